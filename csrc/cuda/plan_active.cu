// plan_active: one block of four warps per layer of the batch.
#include "algorithms/plan_active.h"
#include "cuda/cuda.h"
#include "cuda/launch.cuh"

namespace isoload::cuda {
namespace {

template <int W>
__global__ void __launch_bounds__(PlanTeam::kLanes, 1)
    plan_active_kernel(ActiveProblem problem, ActiveResult result, void* global, int32_t* errors) {
  __shared__ PlanTeam::Group group;
  PlanTeam team(group);
  const int64_t b = blockIdx.x, E = problem.E, R = problem.R, P = R * problem.S;
  problem.tables = problem.tables.layer(b, E, P);
  problem.loads += b * problem.num_sources * E;
  const ActiveResult mine{result.quota + b * P, result.peak + b, result.bound + b, result.telemetry + b * 4};
  void* const memory = block_workspace(global, ActiveWorkspace<W>::bytes(R, E));
  ActiveSolver<W, PlanTeam> solver(team, problem, ActiveWorkspace<W>::at(memory, R, E), mine);
  if (solver.solve() == PlanStatus::ok) return;
  refuse(team, mine.quota, P, mine.peak, mine.bound);
  if (team.rank() == 0) report(errors, kPlanActive);
  team.for_each(4, [&](int i) { mine.telemetry[i] = 0; });
}

}  // namespace

int64_t plan_active_bytes(int64_t B, int R, int E) {
  return with_words(R, [&](auto W) { return global_bytes(B, ActiveWorkspace<W>::bytes(R, E)); });
}

const char* plan_active(const ActiveProblem& problem, const ActiveResult& result, int64_t B, void* global,
                        void* stream) {
  return with_words(problem.R, [&](auto W) {
    const int64_t bytes = global ? 0 : ActiveWorkspace<W>::bytes(problem.R, problem.E);
    return launch(plan_active_kernel<W>, B, PlanTeam::kLanes, bytes, stream, problem, result, global,
                  error_word());
  });
}

}  // namespace isoload::cuda
