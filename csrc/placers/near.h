// Fewer rows to other nodes at the same load: random changes of slots that keep the caps and raise no rows,
// from the placement as it is and from random changes of it.
// tests/reference/place_near.py finds the same slots.
#pragma once

#include "placers/level.h"
#include "placers/repoints.h"
#include "placers/rows.h"
#include "placers/start.h"

namespace isoload::placers {

// Numbers from a seed (splitmix64), the same on every machine.
class Draw {
 public:
  explicit Draw(uint64_t seed) : state_(seed) {}

  int below(int n) {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return static_cast<int>(((z ^ (z >> 31)) >> 33) % static_cast<uint64_t>(n));
  }

 private:
  uint64_t state_;
};

struct NearLimits {
  int steps;              // changes tried from one start
  int walk;               // the first of them, which may raise rows and exceed the caps
  int moves;              // slots that may differ from `before`; -1 = all
  const int32_t* before;  // [R, width] or null
};

// The caps are those of the placement that the search starts from. An even split is capped in the mean of the
// scenarios: it keeps the replicas where the load is. The exact split, which routing makes batch by batch, is
// capped under stress: every scenario's distance from the mean, enlarged. Without stress the peak of unseen
// batches rises.
class Near {
 public:
  Near(const Problem& problem, const double* stress, const Choices& choices, const NearLimits& limits,
       const int32_t* slots, uint64_t seed)
      : problem_(problem),
        stressed_(problem),
        choices_(choices),
        limits_(limits),
        even_(taken(problem_, slots)),
        was_(even_.holds.size()),
        draw_(seed),
        rows_(even_, choices),
        level_(problem_) {
    stressed_.load = stress, stressed_.exact = true;
    level_ = taken(stressed_, slots);
    for (int p = 0; limits.before && p < static_cast<int>(even_.slot.size()); ++p) {
      if (limits.before[p] >= 0) was_[index(even_.rank_of(p), limits.before[p])] = true;
    }
    for (int p = 0; p < static_cast<int>(even_.slot.size()); ++p) {
      if (even_.slot[p] >= 0) used_ += is_new(even_.rank_of(p), even_.slot[p]);
    }
    relevel(kFirstSweeps);
    set_caps();
  }

  // Returns the rows that were reached, -1 if the caps are exceeded.
  int64_t run() {
    const int slots = static_cast<int>(even_.slot.size());
    for (step_ = 0; step_ < limits_.steps; ++step_) {
      const int p = draw_.below(slots), q = draw_.below(slots + slots / 4);
      if (even_.slot[p] < 0) continue;
      if (q < slots)
        try_exchange(p, q);
      else
        try_turn(p, draw_.below(problem_.experts));
    }
    return over_ > 0 ? -1 : rows_.sum();
  }

  int64_t rows() const { return rows_.sum(); }
  const std::vector<int32_t>& slots() const { return even_.slot; }

 private:
  static constexpr int kFirstSweeps = 24, kSweeps = 12;
  static constexpr double kMeanSlack = 1.02, kLevelSlack = 1.002;

  static Layout taken(const Problem& problem, const int32_t* slots) {
    Layout layout(problem);
    take_over(layout, slots);
    return layout;
  }

  void set_caps() {
    double speed = 0, ideal = 0;
    for (int r = 0; r < problem_.ranks; ++r) {
      const double cost = mean_cost(r);
      mean_cap_ = std::max(mean_cap_, cost);
      ideal += cost / problem_.tick[r], speed += 1 / problem_.tick[r];
    }
    mean_cap_ = std::max(mean_cap_, ideal / speed * kMeanSlack);
    level_cap_ = level_.objective() * kLevelSlack;
  }

  size_t index(int r, int e) const { return static_cast<size_t>(r) * problem_.experts + e; }
  int is_new(int r, int e) const { return !was_[index(r, e)]; }
  bool affords(int cost) const { return limits_.moves < 0 || cost <= 0 || used_ + cost <= limits_.moves; }

  double mean_cost(int r) const {
    const double* load = even_.load_on(r);
    return problem_.tick[r] *
           lane_sum(problem_.scenarios, [&](int64_t s) { return problem_.weight[s] * load[s]; });
  }

  void relevel(int sweeps) {
    find_pairs(level_, pairs_);
    level(level_, sweeps, pairs_);
  }

  bool walks() const { return step_ < limits_.walk; }

  void move(int e, int from, int to) { rows_.note(e, from, -1), rows_.note(e, to, 1); }

  // Slots p and q change places. Within a node no rows change, but both ranks' mean costs may approach each
  // other.
  void try_exchange(int p, int q) {
    const int i = even_.rank_of(p), j = even_.rank_of(q), a = even_.slot[p], b = even_.slot[q];
    if (i == j || b < 0 || a == b || !may_move(even_, a, i, j) || !may_move(even_, b, j, i)) return;
    const int cost = is_new(i, b) - is_new(i, a) + is_new(j, a) - is_new(j, b);
    if (!affords(cost)) return;
    const int x = choices_.node[i], y = choices_.node[j];
    const double most = x == y ? std::max(mean_cost(i), mean_cost(j)) : mean_cap_;
    exchange(even_, p, q);
    move(a, x, y), move(b, y, x);
    if (over_ > 0 || walks() || std::max(mean_cost(i), mean_cost(j)) <= most) {
      const int64_t more = x == y ? 0 : rows_.change(a, b);
      if (over_ > 0 || walks() || more <= 0) {
        saved_level_ = level_;
        exchange(level_, p, q);
        relevel(kSweeps);
        if (accepts(more)) {
          if (x != y) rows_.keep();
          used_ += cost;
          return;
        }
        std::swap(level_, saved_level_);
      }
    }
    move(a, y, x), move(b, x, y);
    exchange(even_, p, q);
  }

  // Slot p, whose expert has other copies, gets expert y.
  void try_turn(int p, int y) {
    const int i = even_.rank_of(p), a = even_.slot[p], x = choices_.node[i];
    if (even_.held(i, y) || !may_drop(even_, p)) return;
    const int cost = is_new(i, y) - is_new(i, a);
    if (!affords(cost)) return;
    rows_.note(a, x, -1), rows_.note(y, x, 1);
    const int64_t more = rows_.change(a, y);
    if (over_ > 0 || walks() || more <= 0) {
      saved_even_ = even_, saved_level_ = level_;
      turn(even_, p, y);
      even_.split_evenly(a), even_.split_evenly(y);
      turn(level_, p, y);
      relevel(2 * kSweeps);
      if (accepts(more)) {
        rows_.keep();
        used_ += cost;
        return;
      }
      std::swap(even_, saved_even_), std::swap(level_, saved_level_);
    }
    rows_.note(a, x, 1), rows_.note(y, x, -1);
  }

  // A change that exceeds the caps by less is kept, and one that exceeds them by as much and raises no rows.
  bool accepts(int64_t more) {
    const double over = excess();
    if (!walks() && (over > over_ || (over == over_ && more > 0))) return false;
    over_ = over;
    return true;
  }

  // By how much the caps are exceeded, as a part of them.
  double excess() const {
    double most = 0;
    for (int r = 0; r < problem_.ranks; ++r) most = std::max(most, mean_cost(r));
    return beyond(most, mean_cap_) + beyond(level_.objective(), level_cap_);
  }

  static double beyond(double cost, double cap) { return cost > cap ? cost / cap - 1 : 0; }

  static void turn(Layout& layout, int p, int y) {
    layout.clear(p);
    layout.note(p, y, 1);
  }

  const Problem& problem_;
  Problem stressed_;  // enlarged distances from the mean, split exactly
  const Choices& choices_;
  NearLimits limits_;
  Layout even_;
  std::vector<char> was_;  // [R, E] held before
  Draw draw_;
  Rows rows_;
  Layout level_;  // the same slots under stress
  Layout saved_even_{problem_}, saved_level_{problem_};
  Pairs pairs_;
  double mean_cap_ = 0, level_cap_ = 0, over_ = 0;  // over_: by how much the layout exceeds the caps
  int used_ = 0, step_ = 0;                         // slots that differ from `before`
};

// Fills slots [R, width] with the fewest rows of several searches, ties to the first; rows before and after.
inline void place_near(const Problem& problem, const double* stress, const Choices& choices,
                       const NearLimits& limits, int starts, int32_t* slots, int64_t* rows) {
  const std::vector<int32_t> first(slots, slots + static_cast<size_t>(problem.ranks) * problem.width);
  for (int start = 0; start < starts; ++start) {
    NearLimits own = limits;
    own.walk = start == 0 ? 0 : limits.walk;
    Near search(problem, stress, choices, own, first.data(), static_cast<uint64_t>(start));
    if (start == 0) rows[0] = rows[1] = search.rows();
    const int64_t reached = search.run();
    if (reached < 0 || reached >= rows[1]) continue;
    rows[1] = reached;
    std::copy(search.slots().begin(), search.slots().end(), slots);
  }
}

}  // namespace isoload::placers
