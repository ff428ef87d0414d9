// plan_exact, and one source rank's row of the share of its quota. One kernel makes both
// of a usual problem, so that loads, tables and quota are fetched once; the quota was made from these loads,
// and is not checked.
#pragma once

#include <cstdint>

#include "algorithms/plan_exact.h"
#include "algorithms/share.h"
#include "host_device.h"
#include "planner.h"

namespace isoload {

struct ExactShareProblem : ExactProblem {  // loads per source rank; per_node: for the row, too
  int rank;                                // the source whose row is wanted
};

struct ExactShareResult : ExactResult {
  int32_t* send_counts;  // [P] copies that it sends to every slot
};

struct ExactSharePlanner : ExactPlanner {  // see planner.h
  using Problem = ExactShareProblem;
  using Result = ExactShareResult;

  ISOLOAD_HD static void select(Problem& in, Result& out, int64_t b) {
    ExactPlanner::select(in, out, b);
    out.send_counts += b * in.R * in.S;
  }
  template <int W>
  ISOLOAD_HD static int64_t bytes(const Problem& in) {
    return ExactPlanner::bytes<W>(in) + share_workspace(share_of(in, {})) * int64_t(sizeof(int32_t));
  }
  template <int W, class Team>
  ISOLOAD_HD static int solve(Team& team, const Problem& in, void* memory, const Result& out) {
    const int status = ExactPlanner::solve<W>(team, in, memory, out);
    if (status != kPlanned) return status;
    const ShareProblem problem = share_of(in, out);
    int32_t* const workspace =
        reinterpret_cast<int32_t*>(static_cast<char*>(memory) + ExactPlanner::bytes<W>(in));
    Share<Team> share(team, problem, workspace);
    share.trust(ExactWorkspace<W>::at(memory, in.R, in.E).total);
    share.one_row(in.rank, out.send_counts);
    return kPlanned;
  }
  template <class Team>
  ISOLOAD_HD static void refuse(Team& team, const Problem& in, const Result& out) {
    ExactPlanner::refuse(team, in, out);
    team.for_each(in.R * in.S, [&](int p) { out.send_counts[p] = 0; });
  }

  ISOLOAD_HD static ShareProblem share_of(const Problem& in, const Result& out) {
    return {in.R,    in.E,     in.S, in.per_node, true, in.tables, in.loads, out.quota, ShareOf::one_row,
            in.rank, out.peak, false};
  }
};

}  // namespace isoload
