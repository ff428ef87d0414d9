// share: one block of four warps per layer of the batch. A quota that was not made from the loads gives 0.
#include "algorithms/share.h"
#include "cuda/cuda.h"
#include "cuda/launch.cuh"

namespace isoload::cuda {
namespace {

__host__ __device__ int64_t block_bytes(const ShareProblem& problem, ShareOf of) {
  return share_workspace(problem, of != ShareOf::one_row) * int64_t(sizeof(int32_t));
}

__global__ void __launch_bounds__(PlanTeam::kLanes, 1)
    share_kernel(ShareProblem problem, ShareOf of, int rank, int32_t* out, void* global) {
  __shared__ PlanTeam::Group group;
  PlanTeam team(group);
  const int64_t b = blockIdx.x, R = problem.R, E = problem.E, P = R * problem.S;
  problem.tables = problem.tables.layer(b, E, P);
  problem.loads += b * R * E;
  problem.quota += b * P;
  const int64_t size = of == ShareOf::one_row ? P : of == ShareOf::all_rows ? R * P : R * R;
  out += b * size;
  Share<PlanTeam> solver(team, problem,
                         static_cast<int32_t*>(block_workspace(global, block_bytes(problem, of))));
  if (solver.check() >= 0) {
    team.for_each(size, [&](int i) { out[i] = 0; });
  } else if (of == ShareOf::one_row) {
    solver.one_row(rank, out);
  } else if (of == ShareOf::all_rows) {
    solver.all_rows(out);
  } else {
    solver.all_ranks(out);
  }
}

}  // namespace

int64_t share_bytes(const ShareProblem& problem, ShareOf of, int64_t B) {
  return global_bytes(B, block_bytes(problem, of));
}

const char* share(const ShareProblem& problem, ShareOf of, int rank, int32_t* out, int64_t B, void* global,
                  void* stream) {
  return launch(share_kernel, B, PlanTeam::kLanes, global ? 0 : block_bytes(problem, of), stream, problem, of,
                rank, out, global);
}

}  // namespace isoload::cuda
