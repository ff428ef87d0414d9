// Exchanges of two slots, and what they are worth.
#pragma once

#include <utility>

#include "placers/layout.h"

namespace isoload::placers {

// Whether a copy of expert a stays on its home node, if it has one, when rank i loses its own.
inline bool may_leave(const Layout& layout, int a, int i) {
  const int home = layout.problem->home[a];
  return home < 0 || layout.problem->node[i] != home || layout.at_home[a] > 1;
}

// Whether expert a (-1: none) may move from rank i to rank j: never twice on a rank.
inline bool may_move(const Layout& layout, int a, int i, int j) {
  const int32_t* const node = layout.problem->node;
  return a < 0 || (!layout.held(j, a) && (node[i] == node[j] || may_leave(layout, a, i)));
}

// Slots p and q change places, with what they carry.
inline void exchange(Layout& layout, int p, int q) {
  const int a = layout.slot[p], b = layout.slot[q];
  if (a >= 0) layout.note(p, a, -1);
  if (b >= 0) layout.note(q, b, -1);
  if (b >= 0) layout.note(p, b, 1);
  if (a >= 0) layout.note(q, a, 1);
  double *own = layout.share_of(p), *other = layout.share_of(q);
  double *here = layout.load_on(layout.rank_of(p)), *there = layout.load_on(layout.rank_of(q));
  for (int s = 0; s < layout.problem->scenarios; ++s) {
    const double moved = own[s] - other[s];
    here[s] -= moved, there[s] += moved;
    std::swap(own[s], other[s]);
  }
}

// The ranks at the peak, per scenario. With an exact split several are, and share what one of them gains or
// loses.
struct Bottleneck {
  static constexpr double kNear = 1 - 1.0 / 256;  // levelling ends near the level, not on it

  explicit Bottleneck(const Layout& layout)
      : peak(peaks_of(*layout.problem, layout.rank_load)),
        relief(peak.size()),
        member(layout.rank_load.size()) {
    const Problem& problem = *layout.problem;
    const double near = problem.exact ? kNear : 1.0;
    std::vector<double> speed(peak.size());
    for (int r = 0; r < problem.ranks; ++r) {
      const double *load = layout.load_on(r), tick = problem.tick[r], copies = 1 / tick;
      double* own = row_of(member, r, peak.size());
      for (size_t s = 0; s < peak.size(); ++s) {
        own[s] = load[s] * tick >= peak[s] * near;
        speed[s] += own[s] * copies;
      }
    }
    for (size_t s = 0; s < peak.size(); ++s) relief[s] = 1 / speed[s];
  }

  const double* member_of(int r) const { return row_of(member, r, peak.size()); }

  // Whether rank r is at the peak in a scenario that counts.
  bool is_critical(const Problem& problem, int r) const {
    const double* own = member_of(r);
    for (size_t s = 0; s < peak.size(); ++s) {
      if (own[s] > 0 && peak[s] > 0 && problem.weight[s] > 0) return true;
    }
    return false;
  }

  std::vector<double> peak;    // [n] cost
  std::vector<double> relief;  // [n] fall of the peak per copy less on a member
  std::vector<double> member;  // [R, n] 0 or 1
};

// The objective after an exchange between ranks i and j: exactly if loads are split evenly. With an exact
// split all shares move, so it is estimated from the bottleneck.
class Judge {
 public:
  Judge(const Layout& layout, const Bottleneck& bottleneck)
      : layout_(layout),
        problem_(*layout.problem),
        neck_(bottleneck),
        first_(neck_.peak.size()),
        second_(first_),
        rest_(first_),
        worth_(first_),
        holder_(first_.size()) {}

  void choose_rank(int i) {
    i_ = i;
    if (problem_.exact) return;
    std::fill(first_.begin(), first_.end(), 0.0);
    std::fill(second_.begin(), second_.end(), 0.0);
    std::fill(holder_.begin(), holder_.end(), -1);
    for (int r = 0; r < problem_.ranks; ++r) {
      if (r == i) continue;
      const double *load = layout_.load_on(r), tick = problem_.tick[r];
      for (int s = 0; s < problem_.scenarios; ++s) {
        const double cost = load[s] * tick;
        if (cost > first_[s]) {
          second_[s] = first_[s], first_[s] = cost, holder_[s] = r;
        } else if (cost > second_[s]) {
          second_[s] = cost;
        }
      }
    }
  }

  void choose_other(int j) {
    j_ = j;
    const double *mi = neck_.member_of(i_), *mj = neck_.member_of(j), *weight = problem_.weight;
    const double ti = problem_.tick[i_], tj = problem_.tick[j];
    for (int s = 0; s < problem_.scenarios; ++s) {
      const double even = mi[s] * ti - (1 - mi[s]) * mj[s] * tj;
      worth_[s] = weight[s] * (problem_.exact ? (mi[s] - mj[s]) * neck_.relief[s] : even);
    }
    if (problem_.exact) return;
    for (int s = 0; s < problem_.scenarios; ++s) rest_[s] = holder_[s] == j ? second_[s] : first_[s];
  }

  // What it is worth that slot p's load leaves rank i for rank j. The objective falls by no more than the
  // worth of p less that of q: where i (or j) is at the peak, the peak is at least what is left there.
  ISOLOAD_WIDE double worth(int p) const {
    const double* share = layout_.share_of(p);
    return lane_sum(problem_.scenarios, [&](int64_t s) { return worth_[s] * share[s]; });
  }

  // The objective after slot p of rank i and slot q of rank j change places.
  ISOLOAD_WIDE double after(int p, int q) const {
    const double *a = layout_.share_of(p), *b = layout_.share_of(q), *weight = problem_.weight;
    const double *here = layout_.load_on(i_), *there = layout_.load_on(j_);
    const double ti = problem_.tick[i_], tj = problem_.tick[j_];
    if (!problem_.exact) {
      return lane_sum(problem_.scenarios, [&](int64_t s) {
        const double moved = a[s] - b[s];
        return weight[s] * std::max(rest_[s], std::max((here[s] - moved) * ti, (there[s] + moved) * tj));
      });
    }
    const double *mi = neck_.member_of(i_), *mj = neck_.member_of(j_);
    return lane_sum(problem_.scenarios, [&](int64_t s) {
      const double moved = a[s] - b[s];
      const double level = neck_.peak[s] + (mj[s] - mi[s]) * moved * neck_.relief[s];
      const double outside =
          std::max((1 - mi[s]) * (here[s] - moved) * ti, (1 - mj[s]) * (there[s] + moved) * tj);
      return weight[s] * std::max(level, outside);
    });
  }

 private:
  const Layout& layout_;
  const Problem& problem_;
  const Bottleneck& neck_;
  int i_ = 0, j_ = 0;
  std::vector<double> first_, second_, rest_;  // the largest costs of ranks other than i; than i and j
  std::vector<double> worth_;                  // [n] of a copy that leaves i for j
  std::vector<int> holder_;                    // the rank of the largest
};

}  // namespace isoload::placers
