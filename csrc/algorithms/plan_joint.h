// plan_joint: routed and shared experts decided together, and one source rank's row of the share. One kernel
// does what plan_exact with `pour`, share_by_rank, plan_waterfill and share do one after another: of all that
// lies between, nothing leaves the block.
//
// Shared copies may go to any live rank, and here all are alive: so an exact split that stops at the level of
// all copies, then an exact fill, has the least peak there is.
#pragma once

#include <climits>
#include <cstdint>

#include "algorithms/plan_exact.h"
#include "algorithms/plan_waterfill.h"
#include "algorithms/share.h"
#include "host_device.h"
#include "planner.h"

namespace isoload {

struct JointProblem : ExactProblem {  // loads: null, or [R, E] and tokens where JointMemory has them
  const int32_t* gathered;            // [R, E + num_shared]; the first shared expert's column: tokens
  int num_shared, first_shared;       // copies per token; place of their slots on every rank
  int rank;                           // the source whose row is wanted
};

struct JointResult : ExactResult {  // quota: with the shared copies
  int32_t* row;                     // [P] routed copies that the source sends to every slot
  int32_t* share;                   // [R, R] shared copies that source s sends to rank d
};

// Caller's memory, behind the workspace of the exact split.
template <int W>
struct JointMemory {
  WaterfillWorkspace<W> waterfill;
  int64_t* level;                   // [1]
  int32_t *loads, *tokens, *pour;   // [R, E] routed copies; [R]; [1] all shared ones
  int32_t *copies, *sums, *shares;  // [R, R] routed copies by rank; [R]; workspace of share

  ISOLOAD_HD static int64_t exact_bytes(const JointProblem& in) {
    return (ExactWorkspace<W>::bytes(in.R, in.E) + 7) / 8 * 8;
  }
  ISOLOAD_HD static int64_t waterfill_bytes(const JointProblem& in) {
    return (WaterfillWorkspace<W>::bytes(in.R) + 7) / 8 * 8;
  }
  ISOLOAD_HD static ShareProblem share_of(const JointProblem& in, const int32_t* quota) {
    return {in.R, in.E, in.S, in.per_node, true, in.tables, in.loads, quota};
  }
  ISOLOAD_HD static int64_t bytes(const JointProblem& in) {
    const int64_t R = in.R,
                  ints = R * in.E + R + 1 + R * R + R + share_workspace(share_of(in, nullptr), true);
    return exact_bytes(in) + waterfill_bytes(in) + int64_t(sizeof(int64_t)) + ints * int64_t(sizeof(int32_t));
  }
  ISOLOAD_HD static JointMemory at(void* memory, const JointProblem& in) {
    char* const behind = static_cast<char*>(memory) + exact_bytes(in);
    const int64_t R = in.R;
    JointMemory m;
    m.waterfill = WaterfillWorkspace<W>::at(behind, R);
    m.level = reinterpret_cast<int64_t*>(behind + waterfill_bytes(in));
    m.loads = reinterpret_cast<int32_t*>(m.level + 1);
    m.tokens = m.loads + R * in.E;
    m.pour = m.tokens + R;
    m.copies = m.pour + 1;
    m.sums = m.copies + R * R;
    m.shares = m.sums + R;
    return m;
  }
};

struct JointPlanner {  // see planner.h
  using Problem = JointProblem;
  using Result = JointResult;
  static constexpr bool kSets = true;

  ISOLOAD_HD static void select(Problem& in, Result& out, int64_t b) {
    const int64_t R = in.R, P = R * in.S;
    ExactPlanner::select(in, out, b);
    in.loads = nullptr;
    in.gathered += b * R * (in.E + in.num_shared);
    out.row += b * P, out.share += b * R * R;
  }
  template <int W>
  ISOLOAD_HD static int64_t bytes(const Problem& in) {
    return JointMemory<W>::bytes(in);
  }
  template <int W, class Team>
  ISOLOAD_HD static int solve(Team& team, Problem& in, void* memory, const Result& out) {
    const JointMemory<W> m = JointMemory<W>::at(memory, in);
    if (in.loads == nullptr) take_apart(team, in, m);
    int64_t pour = 0;
    bool negative = false;
    team.for_each(in.R, [&](int s) {
      negative |= m.tokens[s] < 0;
      pour += int64_t(in.num_shared) * m.tokens[s];
    });
    if (team.any_lane(negative)) return static_cast<int>(PlanStatus::negative_load);
    pour = team.sum(pour);
    if (pour > INT32_MAX) return static_cast<int>(PlanStatus::too_many_copies);
    if (team.rank() == 0) *m.pour = static_cast<int32_t>(pour);
    team.sync();
    in.pour = m.pour;
    const int status = ExactPlanner::solve<W>(team, in, memory, out);
    if (status != kPlanned) return status;

    const ShareProblem problem = JointMemory<W>::share_of(in, out.quota);
    const ReplicaTables& t = in.tables;
    const int32_t* const own = in.loads + int64_t(in.rank) * in.E;
    team.for_each(in.R * in.S, [&](int p) { out.row[p] = t.solo[p] < 0 ? 0 : own[t.solo[p]]; });
    Share<Team>(team, problem, m.shares).all_ranks(m.copies, [&](int s, int j, int32_t copies) {
      if (s == in.rank) out.row[t.slots[j]] += copies;
    });
    const WaterfillProblem poured{in.R,     in.per_node, in.num_shared, Candidates::all,
                                  m.copies, m.tokens,    in.ticks,      nullptr};
    const WaterfillResult result{out.share, out.peak, m.level};
    Waterfill<W, Team>(team, poured, m.waterfill, result).solve();  // the exact split refused what it would
    if (team.rank() == 0 && *out.peak < *out.bound) *out.bound = *out.peak;
    add_shared(team, in, m, out);
    team.sync();
    return kPlanned;
  }
  template <class Team>
  ISOLOAD_HD static void refuse(Team& team, const Problem& in, const Result& out) {
    ExactPlanner::refuse(team, in, out);
    team.for_each(in.R * in.S, [&](int p) { out.row[p] = 0; });
    team.for_each(in.R * in.R, [&](int i) { out.share[i] = 0; });
  }

 private:
  template <int W, class Team>
  ISOLOAD_HD static void take_apart(Team& team, Problem& in, const JointMemory<W>& m) {
    for (int s = 0; s < in.R; ++s) {
      const int32_t* const row = in.gathered + int64_t(s) * (in.E + in.num_shared);
      team.for_each(in.E, [&](int e) { m.loads[int64_t(s) * in.E + e] = row[e]; });
    }
    team.for_each(in.R,
                  [&](int s) { m.tokens[s] = in.gathered[int64_t(s) * (in.E + in.num_shared) + in.E]; });
    in.loads = m.loads;
  }

  // The shared slots' quota, which the split left at 0. Of a source's first c copies in rank order shared
  // expert j has (c + j) / num_shared: what route_shared deals.
  template <int W, class Team>
  ISOLOAD_HD static void add_shared(Team& team, const Problem& in, const JointMemory<W>& m,
                                    const Result& out) {
    const int R = in.R, n = in.num_shared;
    int32_t* const quota = out.quota + in.first_shared;
    if (n == 1) {
      team.column_sums(out.share, R, R, m.sums);
      team.for_each(R, [&](int d) { quota[d * in.S] = m.sums[d]; });
      return;
    }
    team.for_each(R, [&](int s) {
      uint32_t before = 0;
      for (int d = 0; d < R; ++d) {
        const uint32_t upto = before + static_cast<uint32_t>(out.share[int64_t(s) * R + d]);
        for (int j = 0; upto > before && j < n; ++j)
          team.add(&quota[d * in.S + j], static_cast<int32_t>((upto + j) / n - (before + j) / n));
        before = upto;
      }
    });
  }
};

}  // namespace isoload
