// plan_active: all copies of an expert on one of its replicas, so that the rank with most active slots has as
// few as possible. For small batches, where a step takes as long as reading the weights of the active slots.
//
// Which replica an expert takes is the flow of plan_exact with one unit per expert that has load: its
// integral optimum leaves every unit whole, and its bound proves that no choice does better. Of the many
// optima, settle then takes one with a lower peak in copies: while it helps, an expert moves to a replica
// whose rank has a slot to spare and ends below the load of the rank it left. Each move lowers the larger of
// two loads and raises no rank above the proved number of slots. Integers only, ties go to the lowest rank.
#pragma once

#include <cstdint>

#include "algorithms/plan_exact.h"
#include "algorithms/replica_tables.h"
#include "host_device.h"
#include "planner.h"

namespace isoload {

constexpr int kSettleRounds = 8;  // rounds over all experts; most layers are done after two or three

struct ActiveProblem : SplitProblem {};

// quota: an expert's load in one of its slots; peak: the largest number of active slots of a rank; telemetry:
// sweeps, augmentations and Newton steps of the solve, moves of settle.
using ActiveResult = ExactResult;

// Caller's memory; every array is written before it is read.
template <int W>
struct ActiveWorkspace {
  ExactWorkspace<W> exact;
  int32_t *total, *unit;     // [E] copies per expert; 1 if there are any
  int32_t *copies, *active;  // [R] per rank

  ISOLOAD_HD static int64_t bytes(int64_t R, int64_t E) {
    return ExactWorkspace<W>::bytes(R, E) + 2 * (E + R) * int64_t(sizeof(int32_t));
  }
  ISOLOAD_HD static ActiveWorkspace at(void* memory, int64_t R, int64_t E) {
    ActiveWorkspace ws;
    ws.exact = ExactWorkspace<W>::at(memory, R, E);
    ws.total = static_cast<int32_t*>(memory) + ExactWorkspace<W>::bytes(R, E) / int64_t(sizeof(int32_t));
    ws.unit = ws.total + E;
    ws.copies = ws.unit + E;
    ws.active = ws.copies + R;
    return ws;
  }
};

template <int W, class Team>
class ActiveSolver {
 public:
  ISOLOAD_HD ActiveSolver(Team& team, const ActiveProblem& problem, ActiveWorkspace<W> workspace,
                          const ActiveResult& out)
      : team_(team), in_(problem), t_(problem.tables), ws_(workspace), out_(out) {}

  // Whether there is a plan, as ExactSolver.
  ISOLOAD_HD bool solve() {
    if (!add_up()) return false;
    ExactProblem units{};
    static_cast<SplitProblem&>(units) = in_;
    units.loads = ws_.unit, units.num_sources = 1;
    units.sweeps = kSettleRounds, units.budget = INT32_MAX;
    if (!ExactSolver<W, Team, true>(team_, units, ws_.exact, out_.quota).solve(out_)) return false;
    load_slots();
    const int32_t moves = settle();
    if (team_.rank() == 0) out_.telemetry[3] = moves;  // unlimited: the solve was not cut short
    team_.sync();
    return true;
  }

 private:
  // Copies per expert; refuses what is no load. ExactSolver refuses an expert without a replica.
  ISOLOAD_HD bool add_up() {
    int32_t sign = 0;  // of loads, and of sums on their way
    int64_t copies = 0;
    team_.for_each(in_.E, [&](int e) { sign |= ws_.total[e] = in_.loads[e]; });
    for (int s = 1; s < in_.num_sources; ++s) {  // a lane keeps its experts, so no barrier between rows
      const int32_t* row = in_.loads + int64_t(s) * in_.E;
      team_.for_each(in_.E, [&](int e) {
        sign |= row[e];
        sign |= ws_.total[e] = static_cast<int32_t>(uint32_t(ws_.total[e]) + uint32_t(row[e]));
      });
    }
    team_.for_each(in_.E, [&](int e) {
      copies += ws_.total[e];
      ws_.unit[e] = ws_.total[e] > 0;
    });
    return team_.sum(sign < 0 ? kTooMany : copies) <= INT32_MAX;
  }

  // Units become copies; counts both per rank.
  ISOLOAD_HD void load_slots() {
    team_.for_each(in_.R, [&](int r) {
      int32_t active = 0, copies = 0;
      ISOLOAD_ROLLED
      for (int p = r * in_.S; p < r * in_.S + in_.S; ++p) {
        if (out_.quota[p] == 0) continue;
        const int e = t_.split[p] >= 0 ? t_.order[t_.split[p]] : t_.solo[p];
        out_.quota[p] = ws_.total[e];
        ++active, copies += ws_.total[e];
      }
      ws_.active[r] = active;
      ws_.copies[r] = copies;
    });
    team_.sync();
  }

  // Class by class, as plan_exact sweeps: no two experts of a class share a rank.
  ISOLOAD_HD int32_t settle() {
    int32_t moves = 0;
    for (int round = 0; round < kSettleRounds; ++round) {
      int32_t moved = 0;
      for (int k = 0; k < t_.num_classes(); ++k) {
        const int first = t_.classes[k];
        team_.for_each(t_.classes[k + 1] - first, [&](int i) { moved += relieve(t_.order[first + i]); });
        team_.sync();
      }
      moved = team_.sum32(moved);
      moves += moved;
      if (moved == 0) break;
    }
    return moves;
  }

  // Moves e to the replica whose rank then has the fewest copies, if it has a slot to spare and ends below
  // e's rank.
  ISOLOAD_HD bool relieve(int e) {
    const int32_t n = ws_.total[e];
    int from = t_.offsets[e];
    ISOLOAD_ROLLED
    while (from < t_.offsets[e + 1] && out_.quota[t_.slots[from]] == 0) ++from;
    if (from == t_.offsets[e + 1]) return false;  // no load
    int to = from;
    int32_t least = ws_.copies[t_.ranks[from]];
    ISOLOAD_ROLLED
    for (int j = t_.offsets[e]; j < t_.offsets[e + 1]; ++j) {
      if (j == from || (ws_.active[t_.ranks[j]] + 1) > *out_.peak) continue;
      if (const int32_t here = ws_.copies[t_.ranks[j]] + n; here < least) least = here, to = j;
    }
    if (to == from) return false;
    out_.quota[t_.slots[from]] = 0, out_.quota[t_.slots[to]] = n;
    ws_.copies[t_.ranks[from]] -= n, ws_.copies[t_.ranks[to]] += n;
    --ws_.active[t_.ranks[from]], ++ws_.active[t_.ranks[to]];
    return true;
  }

  Team& team_;
  const ActiveProblem& in_;
  const ReplicaTables t_;
  const ActiveWorkspace<W> ws_;
  const ActiveResult out_;
};

struct ActivePlanner : PlannerOf<ActiveProblem, ActiveResult, true> {  // see planner.h
  ISOLOAD_HD static void select(Problem& in, Result& out, int64_t b) {
    in.SplitProblem::select(b);
    out.select(b, int64_t(in.R) * in.S);
  }
  template <int W>
  ISOLOAD_HD static int64_t bytes(const Problem& in) {
    return ActiveWorkspace<W>::bytes(in.R, in.E);
  }
  template <int W, class Team>
  ISOLOAD_HD static int solve(Team& team, const Problem& in, void* memory, const Result& out) {
    ActiveSolver<W, Team> solver(team, in, ActiveWorkspace<W>::at(memory, in.R, in.E), out);
    return solver.solve() ? kPlanned : 0;
  }
  template <class Team>
  ISOLOAD_HD static void refuse(Team& team, const Problem& in, const Result& out) {
    out.refuse(team, in.R * in.S);
  }
};

}  // namespace isoload
