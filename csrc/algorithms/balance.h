// balance: moves one replicated expert's copies between its replicas so that their ranks' loads draw level.
//
// The sweeps of plan_exact. Touches only the expert's own ranks, and never raises the largest load among
// them.
#pragma once

#include <cstdint>

#include "algorithms/quotient.h"
#include "algorithms/replica_tables.h"
#include "host_device.h"

namespace isoload {

// Replicated experts, so that nothing need be looked up by expert: i has replicas first[i] .. last[i]-1 and
// copies[i].
struct Replicated {
  int32_t *first, *last, *copies;

  ISOLOAD_HD Replicated from(int i) const { return {first + i, last + i, copies + i}; }
};

// Two replicas, equal ticks: past the balance by 2/5. Over-relaxation saves a third of the sweeps and cannot
// raise the larger load of the two.
ISOLOAD_HD inline void balance_pair(const ReplicaTables& t, int j, int32_t* load, int32_t* quota) {
  const int slot0 = t.slots[j], slot1 = t.slots[j + 1], rank0 = t.ranks[j], rank1 = t.ranks[j + 1];
  const int32_t q0 = quota[slot0], q1 = quota[slot1], load0 = load[rank0], load1 = load[rank1];
  int64_t gap = 7 * (int64_t(load1) - load0) / 10;  // from 1 to 0
  gap = gap > q1 ? q1 : gap;
  const int32_t move = static_cast<int32_t>(gap < -q0 ? -q0 : gap);
  quota[slot0] = q0 + move, load[rank0] = load0 + move;
  quota[slot1] = q1 - move, load[rank1] = load1 - move;
}

// More replicas, equal ticks: pours the expert's copies anew onto the other load of its ranks, to one level.
// A group of lanes, which take a replica each; further ones keep that load in the place of their quota.
// Whether this lane's copies moved.
template <class Group>
ISOLOAD_HD bool balance_level(Group& group, const ReplicaTables& t, int first, int copies, int32_t total,
                              int32_t* load, int32_t* quota) {
  struct Replica {
    int rank, slot;
  };
  auto read = [&](int i) { return Replica{t.ranks[first + i], t.slots[first + i]}; };
  const int own = group.rank(), next = own + group.size();
  const Replica my = own < copies ? read(own) : Replica{};
  const int32_t had = own < copies ? quota[my.slot] : 0, mine = own < copies ? load[my.rank] - had : 0;
  ISOLOAD_ROLLED
  for (int i = next; i < copies; i += group.size()) {
    const Replica at = read(i);
    quota[at.slot] = load[at.rank] - quota[at.slot];
  }
  auto sum_of = [&](auto&& f) {  // over the replicas' other load
    int32_t sum = own < copies ? f(mine) : 0;
    ISOLOAD_ROLLED
    for (int i = next; i < copies; i += group.size()) sum += f(quota[t.slots[first + i]]);
    return group.sum32(sum);
  };
  int32_t level = INT32_MAX, left = 0;  // every sum here is below 2^31: it counts copies of the batch
  for (int below = copies, before = -1; below != before;) {  // ranks above the level drop out; it only falls
    before = below;
    const int32_t sum = total + sum_of([&](int32_t load) { return load <= level ? load : 0; });
    level = uint32_t(sum) / uint32_t(before);
    left = uint32_t(sum) % uint32_t(before);
    below = sum_of([&](int32_t load) { return int32_t(load <= level); });
  }
  bool moved = false;
  ISOLOAD_ROLLED
  for (int begin = 0; begin < copies; begin += group.size()) {  // the first ranks take what is left over
    const int i = begin + own;
    const Replica at = begin > 0 && i < copies ? read(i) : my;
    const int32_t other = begin > 0 && i < copies ? quota[at.slot] : mine;
    const bool in = i < copies && other <= level;
    int32_t all;
    const int32_t before = group.lanes_before(in, all);
    if (i < copies) {
      const int32_t q = in ? level - other + (before < left) : 0;
      moved |= q != (begin > 0 ? load[at.rank] - other : had);
      load[at.rank] = other + q;
      quota[at.slot] = q;
    }
    left -= all;
  }
  return moved;
}

// Unequal ticks: from the costliest replica to the cheapest, to equal cost, rounded down.
ISOLOAD_HD inline void balance_costs(const ReplicaTables& t, int first, int last, const int32_t* ticks,
                                     int32_t* load, int32_t* quota) {
  auto cost = [&](int j) { return int64_t(ticks[t.ranks[j]]) * load[t.ranks[j]]; };
  int low = first, high = -1;
  ISOLOAD_ROLLED
  for (int j = first; j < last; ++j) {
    if (cost(j) < cost(low)) low = j;
    if (quota[t.slots[j]] > 0 && (high < 0 || cost(j) > cost(high))) high = j;
  }
  if (high < 0 || cost(high) <= cost(low)) return;
  int64_t move = quotient(cost(high) - cost(low), ticks[t.ranks[high]] + ticks[t.ranks[low]]);
  move = move < quota[t.slots[high]] ? move : quota[t.slots[high]];
  quota[t.slots[high]] -= static_cast<int32_t>(move), load[t.ranks[high]] -= static_cast<int32_t>(move);
  quota[t.slots[low]] += static_cast<int32_t>(move), load[t.ranks[low]] += static_cast<int32_t>(move);
}

// The first n of `split`, which share no rank. load [R] copies per rank; quota [P]; ticks [R] or null.
template <class Team>
ISOLOAD_HD void balance(Team& team, const ReplicaTables& t, const Replicated& split, int n,
                        const int32_t* ticks, int32_t* load, int32_t* quota) {
  team.for_each_by(
      n, [&](int i) { return !ticks && split.last[i] - split.first[i] > 2; },
      [&](int i) {
        if (ticks)
          balance_costs(t, split.first[i], split.last[i], ticks, load, quota);
        else
          balance_pair(t, split.first[i], load, quota);
      },
      [&](int i, auto& group) {
        const int first = split.first[i];
        balance_level(group, t, first, split.last[i] - first, split.copies[i], load, quota);
      });
}

}  // namespace isoload
