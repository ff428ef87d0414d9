// The problem of plan_exact, its result, and the caller's memory.
#pragma once

#include <cstdint>

#include "algorithms/balance.h"
#include "algorithms/least_level.h"
#include "algorithms/quotient.h"
#include "algorithms/replica_tables.h"
#include "algorithms/start.h"
#include "host_device.h"
#include "rank_set.h"

namespace isoload {

// A lane's part of a sum of copies where it has seen what must be refused.
constexpr int64_t kTooMany = int64_t(1) << 48;

struct ExactProblem : SplitProblem {
  Objective objective;     // local: of loads per source
  int per_node;            // ranks of a node, for Objective::local; divides R
  const int32_t* fixed;    // [R] copies a rank carries besides, or null
  const int32_t* ticks;    // [R] cost of one copy on a rank, 1..2^20, or null: all 1
  const int32_t* pour;     // [1] copies that any rank may take once this split is made, or null
  int64_t tolerance_ppm;   // stop at bound * (1 + tolerance)
  int32_t sweeps, budget;  // most balancing sweeps, most augmentations
};

struct ExactResult {
  int32_t* quota;      // [P] copies per slot
  int64_t* peak;       // [1] largest rank cost (copies, or ticks if given), once `pour` is on the ranks too
  int64_t* bound;      // [1] proved lower bound over all integer quotas
  int32_t* telemetry;  // [4] sweeps, augmentations, Newton steps, 1 if the budget ended the solve

  ISOLOAD_HD void select(int64_t b, int64_t P) { quota += b * P, peak += b, bound += b, telemetry += b * 4; }
  template <class Team>
  ISOLOAD_HD void refuse(Team& team, int P) const {
    team.for_each(P, [&](int p) { quota[p] = 0; });
    if (team.rank() > 0) return;
    *peak = *bound = -1;
    ISOLOAD_ROLLED
    for (int i = 0; i < 4; ++i) telemetry[i] = 0;
  }
};

// In two parts, so that nothing overflows; without a sign, which would cost a GPU twice the code.
ISOLOAD_HD ISOLOAD_ONCE inline uint64_t millionths(uint64_t bound, uint64_t ppm) {
  constexpr uint64_t kMillion = 1000000;
  const uint64_t millions = bound / kMillion, rest = bound - millions * kMillion;
  return millions * ppm + rest * ppm / kMillion;
}

// The target of a bound.
ISOLOAD_HD inline int64_t with_tolerance(int64_t bound, int64_t ppm) {
  return ppm == 0 ? bound : bound + millionths(bound, ppm);
}

// The smallest cost at which the ranks of a set, below R, can carry `copies` between them. By a group.
template <int W, class Group>
ISOLOAD_HD ISOLOAD_ONCE int64_t least_cost(Group group, const int32_t* ticks, int R, int64_t copies,
                                           RankSet<W> set) {
  lies_in_global(ticks);
  return least_level(
      group, LevelProblem{R, ticks, 0, copies, copies}, [&](int r) { return set.contains(r); },
      [](int, int64_t carried) { return carried; });
}

// The smallest peak at which `size` of R ranks, those of a set, can carry `copies` < 2^31 between them.
// ticks: [R] or null. found: [1] of the caller's memory.
template <int W, class Team>
ISOLOAD_HD int64_t smallest_peak(Team& team, const int32_t* ticks, int R, int64_t copies, int size,
                                 const RankSet<W>& set, int64_t* found) {
  if (!ticks) return rounded_up(copies, size);
  team.alone([&](auto& group) {
    const int64_t cost = least_cost<W>(group, ticks, R, copies, set);
    if (group.rank() == 0) *found = cost;
  });
  return *found;
}

// Caller's memory; every array is written before it is read. R here: places<W>(R).
template <int W>
struct ExactWorkspace {
  RankSet<W>*levels, *holders,
      *givers;               // [R+1] BFS levels; [E] ranks of a replicated expert; those with quota > 0
  int64_t* found;            // [1] of smallest_peak
  int32_t *load, *cap;       // [R] copies per rank; copies the target allows
  int32_t *from, *to, *via;  // [R] slots of each hop of a path, and its expert in the order
  int32_t *way, *total;      // [R+1] its ranks, from the last one; [E] copies per expert
  Replicated split;          // [E] of the tables' order
  int32_t* level_in;         // [E] Level::in of the sweep before

  ISOLOAD_HD static int64_t bytes(int64_t num_ranks, int64_t E) {
    const int64_t R = places<W>(num_ranks);
    return (2 * E + R + 1) * int64_t(sizeof(RankSet<W>)) + int64_t(sizeof(int64_t)) +
           (5 * E + 6 * R + 1) * int64_t(sizeof(int32_t));
  }
  ISOLOAD_HD static ExactWorkspace at(void* memory, int64_t num_ranks, int64_t E) {
    const int64_t R = places<W>(num_ranks);
    ExactWorkspace ws;
    ws.levels = static_cast<RankSet<W>*>(memory);
    ws.holders = ws.levels + R + 1;
    ws.givers = ws.holders + E;
    ws.found = reinterpret_cast<int64_t*>(ws.givers + E);
    ws.load = reinterpret_cast<int32_t*>(ws.found + 1);
    ws.cap = ws.load + R;
    ws.from = ws.cap + R;
    ws.to = ws.from + R;
    ws.via = ws.to + R;
    ws.way = ws.via + R;
    ws.total = ws.way + R + 1;
    ws.split = {ws.total + E, ws.total + 2 * E, ws.total + 3 * E};
    ws.level_in = ws.split.copies + E;
    return ws;
  }
};

}  // namespace isoload
