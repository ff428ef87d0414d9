// share_alone: one block of four warps per layer of the batch. Counts that are no part of the quota give 0.
#include "algorithms/share_alone.h"
#include "cuda/cuda.h"
#include "cuda/launch.cuh"

namespace isoload::cuda {
namespace {

__global__ void __launch_bounds__(PlanTeam::kLanes, 1)
    share_alone_kernel(ShareAloneProblem problem, int32_t* out, int32_t* errors) {
  __shared__ PlanTeam::Group group;
  PlanTeam team(group);
  const int64_t b = blockIdx.x, E = problem.E, P = problem.P;
  problem.tables = problem.tables.layer(b, E, P);
  problem.counts += b * E;
  problem.quota += b * P;
  out += b * P;
  if (isoload::share_alone(team, problem, out) < 0) return;
  team.for_each(P, [&](int p) { out[p] = 0; });
  if (team.rank() == 0) report(errors, kShareAloneQuota);
}

}  // namespace

const char* share_alone(const ShareAloneProblem& problem, int32_t* out, int64_t B, void* stream) {
  return launch(share_alone_kernel, B, PlanTeam::kLanes, 0, stream, problem, out, error_word());
}

}  // namespace isoload::cuda
