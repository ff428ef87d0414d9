// balance: moves one replicated expert's copies between its replicas so that their ranks' loads draw level.
//
// The sweeps of plan_exact. Touches only the expert's own ranks, and never raises the largest load among
// them.
#pragma once

#include <cstdint>

#include "algorithms/replica_tables.h"
#include "host_device.h"

namespace isoload {

// Two replicas, equal ticks: past the balance by 2/5. Over-relaxation saves a third of the sweeps and cannot
// raise the larger load of the two.
ISOLOAD_HD inline void balance_pair(const ReplicaTables& t, int j, int32_t* load, int32_t* quota) {
  int32_t &q0 = quota[t.slots[j]], &q1 = quota[t.slots[j + 1]];
  int32_t &load0 = load[t.ranks[j]], &load1 = load[t.ranks[j + 1]];
  int64_t move = 7 * (int64_t(load1) - load0) / 10;  // from 1 to 0
  move = move > q1 ? q1 : move;
  move = move < -q0 ? -q0 : move;
  q0 += static_cast<int32_t>(move), load0 += static_cast<int32_t>(move);
  q1 -= static_cast<int32_t>(move), load1 -= static_cast<int32_t>(move);
}

// More replicas, equal ticks: pours the expert's copies anew onto the other load of its ranks, to one level.
ISOLOAD_HD inline void balance_level(const ReplicaTables& t, int e, int32_t total, int32_t* load,
                                     int32_t* quota) {
  const int first = t.offsets[e], last = t.offsets[e + 1];
  auto base = [&](int j) { return load[t.ranks[j]] - quota[t.slots[j]]; };
  int32_t level = INT32_MAX, left = 0;  // every sum here is below 2^31: it counts copies of the batch
  for (int below = 0, before = -1; below != before;) {  // ranks above the level drop out; it only falls
    before = below;
    below = 0;
    int32_t sum = total;
    for (int j = first; j < last; ++j) {
      const bool in = base(j) <= level;
      sum += in ? base(j) : 0;
      below += in;
    }
    level = sum / below;
    left = sum % below;
  }
  for (int j = first; j < last; ++j) {
    const int32_t other = base(j);
    const bool in = other <= level;
    const int32_t q = in ? level - other + (left > 0) : 0;
    left -= in && left > 0;
    load[t.ranks[j]] = other + q;
    quota[t.slots[j]] = q;
  }
}

// Unequal ticks: from the costliest replica to the cheapest, to equal cost, rounded down.
ISOLOAD_HD inline void balance_costs(const ReplicaTables& t, int e, const int32_t* ticks, int32_t* load,
                                     int32_t* quota) {
  auto cost = [&](int j) { return int64_t(ticks[t.ranks[j]]) * load[t.ranks[j]]; };
  int low = t.offsets[e], high = -1;
  for (int j = t.offsets[e]; j < t.offsets[e + 1]; ++j) {
    if (cost(j) < cost(low)) low = j;
    if (quota[t.slots[j]] > 0 && (high < 0 || cost(j) > cost(high))) high = j;
  }
  if (high < 0) return;
  int64_t move = (cost(high) - cost(low)) / (int64_t(ticks[t.ranks[high]]) + ticks[t.ranks[low]]);
  move = move < quota[t.slots[high]] ? move : quota[t.slots[high]];
  if (move <= 0) return;
  quota[t.slots[high]] -= static_cast<int32_t>(move), load[t.ranks[high]] -= static_cast<int32_t>(move);
  quota[t.slots[low]] += static_cast<int32_t>(move), load[t.ranks[low]] += static_cast<int32_t>(move);
}

// e: a replicated expert with `total` copies; load [R] copies per rank; quota [P]; ticks [R] or null.
ISOLOAD_HD inline void balance(const ReplicaTables& t, int e, int32_t total, const int32_t* ticks,
                               int32_t* load, int32_t* quota) {
  if (ticks) {
    balance_costs(t, e, ticks, load, quota);
  } else if (t.copies(e) == 2) {
    balance_pair(t, t.offsets[e], load, quota);
  } else {
    balance_level(t, e, total, load, quota);
  }
}

}  // namespace isoload
