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

// 7/10 of d, rounded towards 0, in 32 bits.
ISOLOAD_HD inline int32_t seven_tenths(int32_t d) {
  const uint32_t size = d < 0 ? -uint32_t(d) : d, tens = size / 10;
  const int32_t part = static_cast<int32_t>(7 * tens + 7 * (size - 10 * tens) / 10);
  return d < 0 ? -part : part;
}

// Replicated experts, so that nothing need be looked up by expert: i has replicas first[i] .. last[i]-1 and
// copies[i].
struct Replicated {
  int32_t *first, *last, *copies;

  ISOLOAD_HD Replicated from(int i) const { return {first + i, last + i, copies + i}; }
};

// What moves from the second of two replicas to the first, equal ticks: past the balance by 2/5.
// Over-relaxation saves a third of the sweeps and cannot raise the larger load of the two.
ISOLOAD_HD inline int32_t pair_move(int32_t load0, int32_t load1, int32_t q0, int32_t q1) {
  const int32_t gap = seven_tenths(load1 - load0);  // loads are no less than 0
  const int32_t most = gap > q1 ? q1 : gap;
  return most < -q0 ? -q0 : most;
}

ISOLOAD_HD inline void balance_pair(const ReplicaTables& t, int j, int32_t* load, int32_t* quota) {
  const int slot0 = t.slots[j], slot1 = t.slots[j + 1], rank0 = t.ranks[j], rank1 = t.ranks[j + 1];
  const int32_t q0 = quota[slot0], q1 = quota[slot1], load0 = load[rank0], load1 = load[rank1];
  const int32_t move = pair_move(load0, load1, q0, q1);
  quota[slot0] = q0 + move, load[rank0] = load0 + move;
  quota[slot1] = q1 - move, load[rank1] = load1 - move;
}

// More replicas, equal ticks: a group of lanes takes one each. What a lane keeps of its own.
struct Level {
  int first = 0, copies = 0;
  int32_t total = 0;
  int rank = 0, slot = 0;
  int32_t q = 0;
  uint32_t inverse = 0;  // Divisor's of lane + 1: no division in the loop over levels
  uint32_t in = 0;       // lanes whose ranks were at most at the level when last it was found; at first all

  template <class Group>
  ISOLOAD_HD static Level of(const Group& group, const ReplicaTables& t, int first, int copies, int32_t total,
                             const int32_t* quota, uint32_t inverse) {
    const int own = group.rank(), size = group.size(), j = first + own;
    const int lanes = size == 1 || copies > size ? size : copies;  // of one, a compiler knows
    Level my{first, copies, total, 0, 0, 0, inverse, ~uint32_t(0) >> (32 - lanes)};
    if (own < copies) my.rank = t.ranks[j], my.slot = t.slots[j], my.q = quota[my.slot];
    return my;
  }
};

// As of one lane, by a group: its first two lanes have a replica each.
template <class Group>
ISOLOAD_HD void balance_pair(Group& group, Level& my, int32_t* load, int32_t* quota) {
  const bool has = group.rank() < 2;
  const int32_t mine = has ? load[my.rank] : 0;
  const int32_t load0 = group.from_lane_of(0, mine), load1 = group.from_lane_of(1, mine);
  const int32_t move = pair_move(load0, load1, group.from_lane_of(0, my.q), group.from_lane_of(1, my.q));
  if (!has) return;
  const int32_t gain = group.rank() == 0 ? move : -move;
  quota[my.slot] = my.q += gain;
  load[my.rank] = mine + gain;
}

// balance_level for a replica per lane: nothing is beyond the lanes, and no division is in the loop.
template <class Group>
ISOLOAD_HD bool balance_level_of_lanes(Group& group, Level& my, int32_t* load, int32_t* quota) {
  const int own = group.rank();
  const bool has = own < my.copies;
  const int32_t mine = has ? load[my.rank] - my.q : 0;
  int32_t level, left;
  for (bool found = false; !found;) {
    const int number = count_ones(my.in);
    const int32_t sum = my.total + group.sum32(my.in >> own & 1 ? mine : 0);
    level = Divisor(number, group.from_lane_of(number - 1, my.inverse)).quotient(sum);
    left = sum - level * number;
    const uint32_t in = group.lanes_with(has && mine <= level);
    found = in == my.in;
    my.in = in;
  }
  if (!has) return false;
  const bool more = count_ones(my.in & ((uint32_t(1) << own) - 1)) < left;
  const int32_t q = my.in >> own & 1 ? level - mine + more : 0;
  const bool moved = q != my.q;
  load[my.rank] = mine + q;
  quota[my.slot] = my.q = q;
  return moved;
}

// Pours the expert's copies anew onto the other load of its ranks, to one level. Replicas beyond the lanes
// keep that load in the place of their quota. Whether this lane's copies moved.
template <class Group>
ISOLOAD_HD bool balance_level(Group& group, const ReplicaTables& t, Level& my, int32_t* load,
                              int32_t* quota) {
  if (Group::kLanes > 1 && my.copies <= group.size()) return balance_level_of_lanes(group, my, load, quota);
  const int own = group.rank(), copies = my.copies;
  const int32_t *const ranks = t.ranks + my.first, *const slots = t.slots + my.first;
  const int32_t mine = own < copies ? load[my.rank] - my.q : 0;
  ISOLOAD_ROLLED
  for (int i = own + group.size(); i < copies; i += group.size())
    quota[slots[i]] = load[ranks[i]] - quota[slots[i]];
  int32_t level = INT32_MAX, left = 0;  // every sum here is below 2^31: it counts copies of the batch
  // Only one set of ranks has just those at most at its own level. From a wrong guess the next one holds it
  // or lies in it, the one behind that holds it, and then ranks above the level drop out.
  int beyond = copies > group.size() ? copies - group.size() : 0;  // replicas that are in, too
  for (bool found = false; !found;) {
    const uint32_t number = count_ones(my.in) + beyond;
    int32_t sum = my.in >> own & 1 ? mine : 0;
    ISOLOAD_ROLLED
    for (int i = own + group.size(); i < copies; i += group.size())
      sum += quota[slots[i]] <= level ? quota[slots[i]] : 0;
    sum = my.total + group.sum32(sum);
    level = uint32_t(sum) / number, left = uint32_t(sum) % number;
    const uint32_t in = group.lanes_with(own < copies && mine <= level);
    int now = 0;
    ISOLOAD_ROLLED
    for (int i = own + group.size(); i < copies + own; i += group.size())
      now += count_ones(group.lanes_with(i < copies && quota[slots[i]] <= level));
    found = in == my.in && now == beyond;
    my.in = in, beyond = now;
  }
  bool moved = false;
  uint32_t in = my.in;
  auto take = [&](int rank, int slot, int32_t other, int32_t had) {  // the first ranks get what is left over
    const bool more = count_ones(in & ((uint32_t(1) << own) - 1)) < left;
    const int32_t q = in >> own & 1 ? level - other + more : 0;
    moved |= q != had;
    load[rank] = other + q;
    return quota[slot] = q;
  };
  if (own < copies) my.q = take(my.rank, my.slot, mine, my.q);
  ISOLOAD_ROLLED
  for (int i = own + group.size(); i < copies + own; i += group.size()) {
    const int32_t other = i < copies ? quota[slots[i]] : 0;
    left -= count_ones(in);
    in = group.lanes_with(i < copies && other <= level);
    if (i < copies) take(ranks[i], slots[i], other, load[ranks[i]] - other);
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
        const uint32_t inverse = Divisor(group.rank() + 1).inverse;
        Level level = Level::of(group, t, first, split.last[i] - first, split.copies[i], quota, inverse);
        balance_level(group, t, level, load, quota);
      });
}

}  // namespace isoload
