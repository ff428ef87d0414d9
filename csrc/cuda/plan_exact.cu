// plan_exact: one block of four warps per layer of the batch.
#include "algorithms/plan_exact.h"
#include "cuda/cuda.h"
#include "cuda/launch.cuh"

namespace isoload::cuda {
namespace {

template <int W>
__global__ void __launch_bounds__(PlanTeam::kLanes, 1)
    plan_exact_kernel(ExactProblem problem, ExactResult result, void* global, int32_t* errors) {
  __shared__ PlanTeam::Group group;
  PlanTeam team(group);
  const int64_t b = blockIdx.x, E = problem.E, R = problem.R, P = R * problem.S;
  problem.tables = problem.tables.layer(b, E, P);
  problem.loads += b * problem.num_sources * E;
  if (problem.fixed) problem.fixed += b * R;
  if (problem.pour) problem.pour += b;
  const ExactResult mine{result.quota + b * P, result.peak + b, result.bound + b, result.telemetry + b * 4};
  void* const memory = block_workspace(global, ExactWorkspace<W>::bytes(R, E));
  ExactSolver<W, PlanTeam> solver(team, problem, ExactWorkspace<W>::at(memory, R, E), mine.quota);
  if (solver.solve(mine) == PlanStatus::ok) return;
  refuse(team, mine.quota, P, mine.peak, mine.bound);
  if (team.rank() == 0) report(errors, kPlanExact);
  team.for_each(4, [&](int i) { mine.telemetry[i] = 0; });
}

}  // namespace

int64_t plan_exact_bytes(int64_t B, int R, int E) {
  return with_words(R, [&](auto W) { return global_bytes(B, ExactWorkspace<W>::bytes(R, E)); });
}

const char* plan_exact(const ExactProblem& problem, const ExactResult& result, int64_t B, void* global,
                       void* stream) {
  return with_words(problem.R, [&](auto W) {
    const int64_t bytes = global ? 0 : ExactWorkspace<W>::bytes(problem.R, problem.E);
    return launch(plan_exact_kernel<W>, B, PlanTeam::kLanes, bytes, stream, problem, result, global,
                  error_word());
  });
}

}  // namespace isoload::cuda
