// Local search on the mean over scenarios of the busiest rank's cost.
// tests/reference/place_search.py finds the same slots.
#pragma once

#include <stdexcept>

#include "placers/level.h"
#include "placers/repoints.h"
#include "placers/start.h"

namespace isoload::placers {

// How long a search may be.
struct Limits {
  int steps;              // changes tried
  int moves;              // slots that may differ from `before`; -1 = all
  bool few_slots;         // replica counts matter: with an even split, too, slots may get another expert
  const int32_t* before;  // [R, width] or null
};

// An exchange of slots p and q, or (q = -1) slot p's expert becomes `expert`.
struct Change {
  double gain = 0,
         score = 0;  // by which the objective falls (estimated with an exact split); that per changed slot
  int p = -1, q = -1, expert = -1;
};

// The changes with the highest scores, best first (ties: as found).
class Best {
 public:
  explicit Best(size_t most) : most_(most) {}

  void add(const Change& change) {
    if (change.gain <= 0 || (found_.size() == most_ && change.score <= found_.back().score)) return;
    if (found_.size() == most_) found_.pop_back();
    auto place = found_.end();
    while (place != found_.begin() && (place - 1)->score < change.score) --place;
    found_.insert(place, change);
  }

  const std::vector<Change>& found() const { return found_; }

  // No change with a lower score is added.
  double least() const { return found_.size() == most_ ? found_.back().score : 0; }

 private:
  size_t most_;
  std::vector<Change> found_;
};

class Search {
 public:
  Search(Layout& layout, const Limits& limits)
      : layout_(layout),
        problem_(*layout.problem),
        limits_(limits),
        steps_(limits.steps),
        was_(layout.holds.size()) {
    for (int p = 0; limits.before && p < static_cast<int>(layout.slot.size()); ++p) {
      if (limits.before[p] >= 0)
        was_[static_cast<size_t>(layout.rank_of(p)) * problem_.experts + limits.before[p]] = true;
    }
  }

  // Returns the objective that was reached.
  double run() {
    restore();
    find_pairs(layout_, pairs_);
    if (problem_.exact) level(layout_, kFirstSweeps, pairs_);
    now_ = layout_.objective();
    if (limits_.moves >= 0) {
      while (steps_ > 0 && best_of_all()) continue;
      return now_;
    }
    for (int pass = 0; pass < kPasses && steps_ > 0; ++pass) {
      open_.assign(problem_.ranks, true);
      while (steps_ > 0 && (exchanges() || repoints())) continue;
    }
    return now_;
  }

 private:
  static constexpr int kFirstSweeps = 24, kSweeps = 4, kPasses = 3;
  static constexpr size_t kExchanges = 3, kRepoints = 8;  // estimated changes that are tried, at most

  // Every expert without a copy, or without one on its home node, gets the slot that costs least (ties:
  // lowest).
  void restore() {
    for (int e = 0; e < problem_.experts; ++e) {
      const int home = problem_.home[e];
      if (layout_.copies[e] && (home < 0 || layout_.at_home[e])) continue;
      EvenTurn turned(layout_);
      int best = -1;
      double least = 0;
      for (int p = 0; p < static_cast<int>(layout_.slot.size()); ++p) {
        if (!usable(p) || layout_.held(layout_.rank_of(p), e) || !may_drop(layout_, p)) continue;
        if (home >= 0 && problem_.node[layout_.rank_of(p)] != home) continue;
        const double then = turned.after(p, e);
        if (best < 0 || then < least) best = p, least = then;
      }
      if (best < 0)
        throw std::invalid_argument("before must leave a slot for every expert that lost its last copy");
      used_ += cost_of(Change{0, 0, best, -1, e});
      turn_evenly(best, e);
    }
    if (limits_.moves >= 0 && used_ > limits_.moves) {
      throw std::invalid_argument("moves must be at least " + std::to_string(used_) +
                                  ": so many slots change to give every expert a copy");
    }
  }

  // One round over the busiest ranks; a rank on which nothing helped is left alone until a change touches it.
  bool exchanges() {
    bool better = false;
    Bottleneck neck(layout_);
    for (int i = 0; i < problem_.ranks && steps_ > 0; ++i) {
      if (!open_[i] || !neck.is_critical(problem_, i)) continue;
      open_[i] = false;
      Best best(problem_.exact ? kExchanges : 1);
      find_exchanges(neck, i, best);
      if (!try_in_turn(best)) continue;
      better = true;
      neck = Bottleneck(layout_);
    }
    return better;
  }

  bool repoints() {
    if (!problem_.exact && !limits_.few_slots) return false;
    const Bottleneck neck(layout_);
    Best best(problem_.exact ? kRepoints : 1);
    find_repoints(neck, best);
    return try_in_turn(best);
  }

  // The best change of all, by its gain per changed slot.
  bool best_of_all() {
    const Bottleneck neck(layout_);
    Best best(kRepoints);
    for (int i = 0; i < problem_.ranks; ++i) {
      if (neck.is_critical(problem_, i)) find_exchanges(neck, i, best);
    }
    find_repoints(neck, best);
    return try_in_turn(best);
  }

  bool try_in_turn(const Best& best) {
    for (const Change& change : best.found()) {
      --steps_;
      if (attempt(change)) return true;
    }
    return false;
  }

  bool usable(int p) const { return p % problem_.width < problem_.capacity[layout_.rank_of(p)]; }

  void find_exchanges(const Bottleneck& neck, int i, Best& best) {
    Judge judge(layout_, neck);
    judge.choose_rank(i);
    std::vector<double> worth(problem_.width);
    const double rounding = now_ * 1e-9;  // far above that of sums, so that no change is passed over by it
    for (int j = 0; j < problem_.ranks; ++j) {
      const int own = i * problem_.width, other = j * problem_.width, others = problem_.capacity[j];
      if (j == i || others == 0) continue;
      judge.choose_other(j);
      for (int k = 0; k < others; ++k) worth[k] = judge.worth(other + k);
      const double lowest = *std::min_element(worth.begin(), worth.begin() + others);
      for (int p = own; p < own + problem_.capacity[i]; ++p) {
        const int a = layout_.slot[p];
        if (!may_move(layout_, a, i, j)) continue;
        const double most = judge.worth(p) + rounding;
        double bar = least_gain(best);
        if (most - lowest < bar) continue;
        for (int k = 0; k < others; ++k) {
          if (most - worth[k] < bar) continue;
          const int b = layout_.slot[other + k];
          if (a == b || !may_move(layout_, b, j, i)) continue;
          consider(Change{now_ - judge.after(p, other + k), 0, p, other + k, -1}, best);
          bar = least_gain(best);
        }
      }
    }
  }

  // A change with a lower gain is not kept. With moves the score is per changed slot: any gain may do.
  double least_gain(const Best& best) const { return limits_.moves < 0 ? best.least() : 0; }

  // With an even split only changes that touch a busiest rank can help: its slots, and replicas of its
  // experts.
  void find_repoints(const Bottleneck& neck, Best& best) {
    if (problem_.exact) {
      Relief relief(layout_, neck);
      each_droppable([&](int p) {
        relief.choose_slot(p);
        each_new(p, [&](int y) { consider(Change{relief.gain(y), 0, p, -1, y}, best); });
      });
      return;
    }
    std::vector<char> critical(problem_.ranks), hot(problem_.experts);
    for (int r = 0; r < problem_.ranks; ++r) critical[r] = neck.is_critical(problem_, r);
    for (int p = 0; p < static_cast<int>(layout_.slot.size()); ++p) {
      if (layout_.slot[p] >= 0 && critical[layout_.rank_of(p)]) hot[layout_.slot[p]] = true;
    }
    EvenTurn turned(layout_);
    each_droppable([&](int p) {
      each_new(p, [&](int y) {
        if (hot[y] || critical[layout_.rank_of(p)])
          consider(Change{now_ - turned.after(p, y), 0, p, -1, y}, best);
      });
    });
  }

  template <class Use>
  void each_droppable(const Use& use) const {
    for (int p = 0; p < static_cast<int>(layout_.slot.size()); ++p) {
      if (usable(p) && may_drop(layout_, p)) use(p);
    }
  }

  template <class Use>
  void each_new(int p, const Use& use) const {
    for (int y = 0; y < problem_.experts; ++y) {
      if (!layout_.held(layout_.rank_of(p), y)) use(y);
    }
  }

  // Scores a change, if there are moves for it.
  void consider(Change change, Best& best) const {
    const int cost = limits_.moves < 0 ? 1 : cost_of(change);
    if (limits_.moves >= 0 && used_ + cost > limits_.moves) return;
    change.score = cost > 0 ? change.gain / cost : 2 * change.gain;
    best.add(change);
  }

  bool is_new(int r, int e) const { return e >= 0 && !was_[static_cast<size_t>(r) * problem_.experts + e]; }

  // How many more slots differ from `before`.
  int cost_of(const Change& change) const {
    const int i = layout_.rank_of(change.p), a = layout_.slot[change.p];
    if (change.q < 0) return is_new(i, change.expert) - is_new(i, a);
    const int j = layout_.rank_of(change.q), b = layout_.slot[change.q];
    return is_new(i, b) - is_new(i, a) + is_new(j, a) - is_new(j, b);
  }

  // Makes a change if it lowers the objective.
  bool attempt(const Change& change) {
    const int cost = cost_of(change);
    saved_ = layout_, saved_pairs_ = pairs_;
    if (change.q >= 0) {
      exchange(layout_, change.p, change.q);
    } else if (!problem_.exact) {
      turn_evenly(change.p, change.expert);
    } else {
      if (layout_.slot[change.p] >= 0) layout_.clear(change.p);
      layout_.note(change.p, change.expert, 1);
    }
    if (problem_.exact) {
      find_pairs(layout_, pairs_);
      level(layout_, change.q < 0 ? 2 * kSweeps : kSweeps, pairs_);
    }
    const double then = layout_.objective();
    if (then >= now_) {
      std::swap(layout_, saved_), std::swap(pairs_, saved_pairs_);
      return false;
    }
    now_ = then, used_ += cost;
    if (!open_.empty()) {
      open_[layout_.rank_of(change.p)] = true;
      if (change.q >= 0) open_[layout_.rank_of(change.q)] = true;
    }
    return true;
  }

  void turn_evenly(int p, int y) {
    const int x = layout_.slot[p];
    if (x >= 0) {
      layout_.clear(p);
      layout_.split_evenly(x);
    }
    layout_.note(p, y, 1);
    layout_.split_evenly(y);
  }

  Layout& layout_;
  const Problem& problem_;
  Limits limits_;
  int steps_, used_ = 0;  // left; slots that differ from `before`
  double now_ = 0;
  std::vector<char> was_, open_;  // [R, E] held before; [R] ranks on which an exchange may help
  Pairs pairs_, saved_pairs_;
  Layout saved_{problem_};
};

}  // namespace isoload::placers
