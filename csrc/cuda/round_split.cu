// round_split: one block of four warps per layer of the batch.
#include "algorithms/round_split.h"
#include "cuda/cuda.h"
#include "cuda/launch.cuh"

namespace isoload::cuda {
namespace {

template <class Real>
__global__ void __launch_bounds__(PlanTeam::kLanes, 1)
    round_split_kernel(RoundingProblem<Real> problem, int32_t* quota, int32_t* errors) {
  __shared__ PlanTeam::Group group;
  PlanTeam team(group);
  const int64_t b = blockIdx.x, E = problem.E;
  const int P = problem.R * problem.S;
  problem.tables = problem.tables.layer(b, E, P);
  problem.loads += b * problem.num_sources * E;
  problem.split += b * P;
  quota += b * P;
  if (Rounding<Real, PlanTeam>(team, problem, quota).run()) return;
  team.for_each(P, [&](int p) { quota[p] = 0; });
  if (team.rank() == 0) report(errors, kRoundSplit);
}

}  // namespace

template <class Real>
const char* round_split(const RoundingProblem<Real>& problem, int32_t* quota, int64_t B, void* stream) {
  return launch(round_split_kernel<Real>, B, PlanTeam::kLanes, 0, stream, problem, quota, error_word());
}

template const char* round_split(const RoundingProblem<float>&, int32_t*, int64_t, void*);
template const char* round_split(const RoundingProblem<double>&, int32_t*, int64_t, void*);

}  // namespace isoload::cuda
