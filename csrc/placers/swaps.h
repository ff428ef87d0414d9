// The best exchange of two experts between a rank and any other.
#pragma once

#include "placers/layout.h"

namespace isoload::placers {

// Slots p and q whose contents change places, or (q = -1) slot p whose expert becomes `expert`.
struct Change {
  double gain = 0;  // by which the objective falls
  int p = -1, q = -1, expert = -1;
};

// What judging an exchange on rank i needs, per scenario. The objective is exact with equal parts; with an exact split
// it is estimated, because every part moves: ranks at the peak (the bottleneck) share what one of them gains.
class Judge {
 public:
  explicit Judge(const Layout& layout)
      : layout_(layout),
        n_(layout.problem->scenarios),
        peak_(n_),
        rest_(n_),
        first_(n_),
        second_(n_),
        first_rank_(n_),
        relief_(n_),
        member_(layout.rank_load.size()) {
    layout.find_peaks(peak_.data());
    now_ = Layout::weigh(*layout.problem, peak_.data());
    if (layout.problem->exact) find_bottleneck();
  }

  double now() const { return now_; }

  // Whether rank i has the peak cost in some scenario (exact: nearly).
  bool is_critical(int i) const {
    const double* load = layout_.load_on(i);
    const double tick = layout_.problem->tick[i];
    for (int s = 0; s < n_; ++s) {
      if (layout_.problem->weight[s] > 0 && peak_[s] > 0 && load[s] * tick >= peak_[s] * threshold()) return true;
    }
    return false;
  }

  void choose_rank(int i) {
    i_ = i;
    if (layout_.problem->exact) return;
    std::fill(first_.begin(), first_.end(), 0.0);
    std::fill(second_.begin(), second_.end(), 0.0);
    std::fill(first_rank_.begin(), first_rank_.end(), -1);
    for (int r = 0; r < layout_.problem->ranks; ++r) {
      if (r == i) continue;
      const double *load = layout_.load_on(r), tick = layout_.problem->tick[r];
      for (int s = 0; s < n_; ++s) {
        const double cost = load[s] * tick;
        if (cost > first_[s]) second_[s] = first_[s], first_[s] = cost, first_rank_[s] = r;
        else if (cost > second_[s]) second_[s] = cost;
      }
    }
  }

  void choose_other(int j) {
    j_ = j;
    if (layout_.problem->exact) return;
    for (int s = 0; s < n_; ++s) rest_[s] = first_rank_[s] == j ? second_[s] : first_[s];
  }

  // The objective after slots p on i and q on j change places.
  double after(int p, int q) const { return layout_.problem->exact ? estimate(p, q) : even(p, q); }

 private:
  static constexpr double kNear = 1 - 1.0 / 256;

  double threshold() const { return layout_.problem->exact ? kNear : 1.0; }

  double even(int p, int q) const {
    const Problem& problem = *layout_.problem;
    const double *a = layout_.share_of(p), *b = layout_.share_of(q);
    const double *li = layout_.load_on(i_), *lj = layout_.load_on(j_);
    const double ti = problem.tick[i_], tj = problem.tick[j_];
    double lane[kLanes] = {};
    for (int s = 0; s < n_; s += kLanes) {
      for (int k = s; k < s + kLanes; ++k) {
        const double moved = a[k] - b[k];
        const double most = std::max(rest_[k], std::max((li[k] - moved) * ti, (lj[k] + moved) * tj));
        lane[k - s] += problem.weight[k] * most;
      }
    }
    return (lane[0] + lane[1]) + (lane[2] + lane[3]);
  }

  double estimate(int p, int q) const {
    const Problem& problem = *layout_.problem;
    const double *a = layout_.share_of(p), *b = layout_.share_of(q);
    const double *li = layout_.load_on(i_), *lj = layout_.load_on(j_);
    const double *mi = member_of(i_), *mj = member_of(j_);
    const double ti = problem.tick[i_], tj = problem.tick[j_];
    double lane[kLanes] = {};
    for (int s = 0; s < n_; s += kLanes) {
      for (int k = s; k < s + kLanes; ++k) {
        const double moved = a[k] - b[k];
        const double level = peak_[k] + (mj[k] - mi[k]) * moved * relief_[k];
        const double outside = std::max((1 - mi[k]) * (li[k] - moved) * ti, (1 - mj[k]) * (lj[k] + moved) * tj);
        lane[k - s] += problem.weight[k] * std::max(level, outside);
      }
    }
    return (lane[0] + lane[1]) + (lane[2] + lane[3]);
  }

  const double* member_of(int r) const { return member_.data() + static_cast<size_t>(r) * n_; }

  // member [R, n]: 1 for ranks near the peak; relief [n]: by how much their level falls per copy less.
  void find_bottleneck() {
    std::vector<double> speed(n_);
    for (int r = 0; r < layout_.problem->ranks; ++r) {
      const double *load = layout_.load_on(r), tick = layout_.problem->tick[r];
      double* member = member_.data() + static_cast<size_t>(r) * n_;
      for (int s = 0; s < n_; ++s) {
        member[s] = load[s] * tick >= peak_[s] * kNear;
        speed[s] += member[s] / tick;
      }
    }
    for (int s = 0; s < n_; ++s) relief_[s] = 1 / speed[s];
  }

  const Layout& layout_;
  int n_, i_ = 0, j_ = 0;
  double now_ = 0;
  std::vector<double> peak_, rest_, first_, second_;  // rest: the largest cost of ranks that are neither i nor j
  std::vector<int> first_rank_;
  std::vector<double> relief_, member_;
};

// Whether expert a (-1: none) may move from rank i to rank j.
inline bool may_move(const Layout& layout, int a, int i, int j) {
  if (a < 0) return true;
  if (layout.held(j, a)) return false;
  const Problem& problem = *layout.problem;
  const int home = problem.home[a];
  return home < 0 || problem.node[i] != home || problem.node[j] == home || layout.at_home[a] > 1;
}

// Slots p and q, of different ranks, change places.
inline void exchange(Layout& layout, int p, int q) {
  const int a = layout.slot[p], b = layout.slot[q];
  if (a >= 0) layout.note(p, a, -1);
  if (b >= 0) layout.note(q, b, -1);
  if (b >= 0) layout.note(p, b, 1);
  if (a >= 0) layout.note(q, a, 1);
  const std::vector<double> row(layout.share_of(p), layout.share_of(p) + layout.problem->scenarios);
  layout.carry(p, layout.share_of(q));
  layout.carry(q, row.data());
}

}  // namespace isoload::placers
