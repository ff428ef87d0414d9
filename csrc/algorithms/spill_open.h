// spill_open: the ranks that a try may still give to, each with a spare slot left and room below the target.
//
// A warp looks through all of them in a few steps. One lane keeps them sorted besides, and so finds a rank
// without looking at the others: which of them it is follows from costs and numbers alone.
#pragma once

#include <cstdint>

#include "algorithms/spill_problem.h"
#include "host_device.h"
#include "team.h"

namespace isoload {

// One of the open ranks, or rank -1 and cost kClosed.
struct OpenRank {
  int rank;
  int32_t cost;
  int at;  // where it is in what one lane keeps
};

// Ranks first .. last-1; or, if not inside, all but these.
struct Ranks {
  int first, last;
  bool inside;

  ISOLOAD_HD int begin() const { return inside ? first : 0; }
  ISOLOAD_HD int end(int R) const { return inside ? last : R; }
  ISOLOAD_HD bool has(int r) const { return inside || r < first || r >= last; }
};

// Orders ranks as takers of `wanted` below `limit`: those that can take all come before the others, the
// fullest first, and of these the roomiest first.
struct TakerOrder {
  int32_t fits;

  ISOLOAD_HD TakerOrder(int32_t limit, int32_t wanted) : fits(limit < wanted ? -1 : limit - wanted) {}
  ISOLOAD_HD int32_t key(int32_t cost) const { return cost <= fits ? cost : ~cost; }
  ISOLOAD_HD static int32_t cost(int32_t key) { return key < 0 ? ~key : key; }
};

template <class Group>
class OpenRanks {
 public:
  ISOLOAD_HD OpenRanks(Group& group, const SpillView& view, const SpillState& state)
      : group_(group), in_(view), open_(state.open) {}

  // cost(r): of an open rank, else kClosed. A lane has the ranks that for_each gives it; a barrier must
  // follow.
  template <class F>
  ISOLOAD_HD void begin(F&& cost) const {
    group_.for_each(in_.R, [&](int r) { open_[r] = cost(r); });
  }

  // The one that takes most of `wanted` below `limit`, of several the fullest, then the lowest.
  ISOLOAD_HD OpenRank find(int32_t limit, int32_t wanted, Ranks ranks) const {
    const TakerOrder order(limit, wanted);
    const int first = ranks.begin();
    int i;
    const int32_t cost = order.cost(group_.largest(
        ranks.end(in_.R) - first,
        [&](int k) { return order.key(ranks.has(first + k) ? open_[first + k] : kClosed); }, i));
    return {cost == kClosed ? -1 : first + i, cost, 0};
  }

  // That of a group of ranks with the least cost, of several the lowest.
  ISOLOAD_HD OpenRank least(int g) const {
    const int first = g * in_.per_node;
    int i;
    const int32_t cost = ~group_.largest(in_.group_size(), [&](int k) { return ~open_[first + k]; }, i);
    return {cost == kClosed ? -1 : first + i, cost, 0};
  }

  // By one lane: what a rank that was found costs now, no less than before, or kClosed; or one that was
  // closed.
  ISOLOAD_HD void raise(int r, int at, int32_t cost) const { open_[r] = cost; }
  ISOLOAD_HD void join(int r, int32_t cost) const { open_[r] = cost; }

 private:
  Group& group_;
  const SpillView& in_;
  int32_t* const open_;  // [R]
};

template <>
class OpenRanks<SerialTeam> {
 public:
  ISOLOAD_HD OpenRanks(SerialTeam&, const SpillView& view, const SpillState& state)
      : in_(view),
        open_(state.open),
        ranks_(open_ + view.R),
        costs_(ranks_ + view.R),
        sizes_(costs_ + view.R) {}

  template <class F>
  ISOLOAD_HD void begin(F&& cost) const {
    for (int r = 0; r < in_.R; ++r) open_[r] = cost(r);
    for (int g = 0; g < in_.num_groups(); ++g) sizes_[g] = 0;
    for (int i = 0; i < in_.R; ++i) {
      const int r = in_.order[i], g = in_.group(r);
      if (open_[r] == kClosed) continue;
      const int at = g * in_.per_node + sizes_[g]++;
      ranks_[at] = r, costs_[at] = open_[r];
    }
  }

  ISOLOAD_HD OpenRank find(int32_t limit, int32_t wanted, Ranks ranks) const {
    const TakerOrder order(limit, wanted);
    return ranks.inside ? find_in(order, ranks) : find_sorted(order, ranks);
  }

  ISOLOAD_HD OpenRank least(int g) const {
    const int first = g * in_.per_node;
    int i = first + sizes_[g] - 1;
    if (i < first) return {-1, kClosed, 0};
    while (i > first && costs_[i - 1] == costs_[i]) --i;
    return {ranks_[i], costs_[i], i};
  }

  ISOLOAD_HD void raise(int r, int at, int32_t cost) const {
    open_[r] = cost;
    const int g = in_.group(r);
    if (cost != kClosed) return move_up(g, at, r, cost);
    const int last = g * in_.per_node + --sizes_[g];
    for (int i = at; i < last; ++i) ranks_[i] = ranks_[i + 1], costs_[i] = costs_[i + 1];
  }
  ISOLOAD_HD void join(int r, int32_t cost) const {
    if (cost == kClosed) return;
    open_[r] = cost;
    const int g = in_.group(r);
    move_up(g, g * in_.per_node + sizes_[g]++, r, cost);
  }

 private:
  ISOLOAD_HD OpenRank find_in(TakerOrder order, Ranks ranks) const {
    int best = -1, most = order.key(kClosed);
    for (int r = ranks.first; r < ranks.last; ++r)
      if (const int32_t key = order.key(open_[r]); key > most) best = r, most = key;
    if (best < 0) return {-1, kClosed, 0};
    const int32_t cost = order.cost(most);
    int i = after_fuller(in_.group(best), cost);
    while (ranks_[i] != best) ++i;
    return {best, cost, i};
  }
  ISOLOAD_HD OpenRank find_sorted(TakerOrder order, Ranks ranks) const {
    auto has = [&](int i) { return ranks.has(ranks_[i]); };
    const int fits = after_fuller(0, order.fits);
    for (int i = fits; i < sizes_[0]; ++i)
      if (has(i)) return {ranks_[i], costs_[i], i};
    int best = fits - 1;
    while (best >= 0 && !has(best)) --best;
    if (best < 0) return {-1, kClosed, 0};
    for (int i = best; i >= 0 && costs_[i] == costs_[best]; --i)
      if (has(i)) best = i;
    return {ranks_[best], costs_[best], best};
  }

  // Where those of a group begin that cost no more.
  ISOLOAD_HD int after_fuller(int g, int32_t cost) const {
    const int first = g * in_.per_node, last = first + sizes_[g];
    int fuller = first;
    for (int i = first; i < last; ++i) fuller += costs_[i] > cost;
    return fuller;
  }

  // Puts the rank at its place, i or before.
  ISOLOAD_HD void move_up(int g, int i, int r, int32_t cost) const {
    const int first = g * in_.per_node;
    for (; i > first && (costs_[i - 1] < cost || (costs_[i - 1] == cost && ranks_[i - 1] > r)); --i)
      ranks_[i] = ranks_[i - 1], costs_[i] = costs_[i - 1];
    ranks_[i] = r, costs_[i] = cost;
  }

  const SpillView& in_;
  int32_t* const open_;   // [R]
  int32_t* const ranks_;  // [R] the same by group, the fullest first, then the lowest
  int32_t* const costs_;  // [R] their cost
  int32_t* const sizes_;  // [groups] how many are open
};

}  // namespace isoload
