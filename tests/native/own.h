// plan_own of an instance: what its row's source sends by its own counts.
#pragma once

#include <numeric>

#include "algorithms/plan_own.h"
#include "instances.h"

namespace isoload {

template <class Team>
bool split_own(Team& team, const Instance& in, const ReplicaTables& tables, void* workspace, int32_t* send) {
  const std::vector<int32_t> offset(in.R, 1 << in.row % kOffsetBits);
  std::vector<int64_t> sent(3 * in.R);
  OwnProblem problem{{in.R, in.E, in.S, tables, in.loads.data() + int64_t(in.row) * in.E, 1}};
  problem.offset = offset.data(), problem.sent = sent.data();
  problem.fixed = in.fixed.empty() ? nullptr : in.fixed.data();
  problem.ticks = in.ticks.empty() ? nullptr : in.ticks.data();
  problem.source = in.row, problem.layer = in.S, problem.sweeps = 6;
  const bool split = OwnPlanner::solve<1>(team, problem, workspace, send) == kPlanned;
  if (split) return true;
  OwnPlanner::refuse(team, problem, send);
  team.sync();
  return false;
}

// Every copy goes to a slot of its expert; counts that are refused go nowhere.
inline const char* own_error(const Instance& in, const std::vector<int32_t>& send) {
  std::vector<int32_t> sent(in.E), counts(in.E);
  for (int p = 0; p < in.P(); ++p) {
    const int e = in.slot_to_expert[p];
    if (send[p] < 0 || (e < 0 && send[p] > 0)) return "an empty slot takes a source's own copies";
    if (e >= 0) sent[e] += send[p];
  }
  if (std::accumulate(sent.begin(), sent.end(), int64_t(0)) == 0) return nullptr;
  std::copy_n(in.loads.begin() + int64_t(in.row) * in.E, in.E, counts.begin());
  return sent == counts ? nullptr : "a source that splits its own counts does not send them";
}

}  // namespace isoload
