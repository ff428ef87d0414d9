// plan_joint: routed and shared experts decided together, and one source rank's send_counts. One kernel
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

struct JointProblem : ExactProblem {  // loads and pour: those of JointMemory, once they are there
  const int32_t* gathered;            // [R, E + num_shared]; the first shared expert's column: tokens
  int num_shared, first_shared;       // copies per token; place of their slots on every rank
  int rank;                           // the source whose row is wanted
};

struct JointResult : ExactResult {  // quota: with the shared copies
  int32_t* send_counts;             // [P] routed copies that the source sends to every slot
  int32_t* share;                   // [R, R] shared copies that source s sends to rank d
};

// Caller's memory.
template <int W>
struct JointMemory {
  WaterfillWorkspace<W> waterfill;   // its base: the split's load
  int32_t *tokens, *pour;            // [places<W>(R)]; [1] all shared copies
  void* exact;                       // workspace of the split
  int32_t *loads, *copies, *shares;  // [R, E] and [R, R] routed copies, by rank; [P] workspace of share

  ISOLOAD_HD static int64_t bytes_ahead(int64_t R) {  // of the split's workspace, which begins with sets
    const int64_t bytes = WaterfillWorkspace<W>::bytes(R) + (places<W>(R) + 1) * int64_t(sizeof(int32_t));
    return (bytes + 15) / 16 * 16;
  }
  ISOLOAD_HD static int64_t bytes(const JointProblem& in) {
    const int64_t R = in.R, ints = R * in.E + R * R + R * in.S;
    return bytes_ahead(R) + ExactWorkspace<W>::bytes(R, in.E) + ints * int64_t(sizeof(int32_t));
  }
  ISOLOAD_HD static JointMemory at(void* memory, const JointProblem& in) {
    const int64_t R = in.R, E = in.E;
    JointMemory m;
    m.waterfill = WaterfillWorkspace<W>::at(memory, R);
    m.tokens = m.waterfill.room_left + places<W>(R);
    m.pour = m.tokens + places<W>(R);
    m.exact = static_cast<char*>(memory) + bytes_ahead(R);
    const ExactWorkspace<W> exact = ExactWorkspace<W>::at(m.exact, R, E);
    m.waterfill.base = exact.load;
    m.loads = exact.level_in + E;
    m.copies = m.loads + R * E;
    m.shares = m.copies + R * R;
    return m;
  }
};

// See planner.h; what a refused layer leaves behind, its kernels write themselves.
struct JointPlanner : ExactPlanner {
  using Problem = JointProblem;
  using Result = JointResult;

  ISOLOAD_HD static void select(Problem& in, Result& out, int64_t b) {
    const int64_t R = in.R, P = R * in.S;
    ExactPlanner::select(in, out, b);
    in.loads = nullptr;
    in.gathered += b * R * (in.E + in.num_shared);
    out.send_counts += b * P, out.share += b * R * R;
  }
  template <int W>
  ISOLOAD_HD static int64_t bytes(const Problem& in) {
    return JointMemory<W>::bytes(in);
  }
  template <int W, class Team>
  ISOLOAD_HD static int solve(Team& team, Problem& in, void* memory, const Result& out) {
    const JointMemory<W> m = JointMemory<W>::at(memory, in);
    const int64_t width = in.E + in.num_shared;
    for (int s = 0; s < in.R; ++s)
      team.for_each(in.E, [&](int e) { m.loads[int64_t(s) * in.E + e] = in.gathered[s * width + e]; });
    team.for_each(in.R, [&](int s) { m.tokens[s] = in.gathered[s * width + in.E]; });
    return solve(team, in, m, out);
  }
  // Where loads and tokens are in their place in the memory.
  template <int W, class Team>
  ISOLOAD_HD static int solve(Team& team, Problem& in, const JointMemory<W>& m, const Result& out) {
    const int32_t pour = pour_of(team, in, m.tokens);
    if (team.rank() == 0) *m.pour = pour;
    team.sync();
    in.loads = m.loads, in.pour = m.pour, in.fixed = nullptr;
    const int status = ExactPlanner::solve<W>(team, in, m.exact, out);
    if (status != kPlanned) return status;

    const ShareProblem problem{in.R, in.E, in.S, in.per_node, true, in.tables, in.loads, out.quota};
    const ReplicaTables& t = in.tables;
    const int32_t* const own = in.loads + int64_t(in.rank) * in.E;
    team.for_each(in.R * in.S, [&](int p) { out.send_counts[p] = t.solo[p] < 0 ? 0 : own[t.solo[p]]; });
    Share<Team>(team, problem, m.shares).all_ranks(m.copies, m.loads, [&](int s, int j, int32_t copies) {
      if (s == in.rank) out.send_counts[t.slots[j]] += copies;
    });
    const WaterfillProblem poured{in.R, in.per_node, in.num_shared, m.copies, m.tokens, in.ticks, nullptr};
    const WaterfillResult result{out.share, nullptr, nullptr};
    Waterfill<W, Team>(team, poured, m.waterfill, result).solve_at(*out.peak, pour);
    add_shared(team, in, out);
    team.sync();
    return kPlanned;
  }

  // All shared copies; -1, which the split refuses, where tokens are negative or these copies too many.
  template <class Team>
  ISOLOAD_HD static int32_t pour_of(Team& team, const Problem& in, const int32_t* tokens) {
    constexpr int64_t kNegative = int64_t(1) << 52;  // more than all shared copies can add up to
    int64_t pour = 0;
    team.for_each(in.R,
                  [&](int s) { pour += tokens[s] < 0 ? -kNegative : int64_t(in.num_shared) * tokens[s]; });
    pour = team.sum(pour);
    return uint64_t(pour) <= INT32_MAX ? static_cast<int32_t>(pour) : -1;
  }

  // The shared slots' quota, which the split left at 0. Of a source's first c copies in rank order shared
  // expert j has (c + j) / num_shared: what route_shared deals.
  template <class Team>
  ISOLOAD_HD static void add_shared(Team& team, const Problem& in, const Result& out) {
    const uint32_t R = in.R, n = in.num_shared;
    int32_t* const quota = out.quota + in.first_shared;
    if (n == 1)
      return team.for_each(in.R * in.R, [&](int i) {
        if (out.share[i] > 0) team.add(&quota[uint32_t(i) % R * in.S], out.share[i]);
      });
    team.for_each(in.R, [&](int s) {
      uint32_t copies = 0, whole = 0, rest = 0;  // of the source so far; over n
      ISOLOAD_ROLLED
      for (uint32_t d = 0; d < R; ++d) {
        const auto sent = static_cast<uint32_t>(out.share[int64_t(s) * R + d]);
        if (sent == 0) continue;
        copies += sent;
        const uint32_t before = whole, over = rest;
        whole = copies / n, rest = copies - whole * n;
        ISOLOAD_ROLLED
        for (uint32_t j = 0; j < n; ++j) {
          const uint32_t part = whole - before + (rest + j >= n) - (over + j >= n);
          team.add(&quota[d * in.S + j], static_cast<int32_t>(part));
        }
      }
    });
  }
};

}  // namespace isoload
