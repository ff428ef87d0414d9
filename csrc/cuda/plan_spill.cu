// plan_spill: one block of four warps per layer of the batch.
#include "algorithms/plan_spill.h"
#include "cuda/cuda.h"
#include "cuda/launch.cuh"

namespace isoload::cuda {
namespace {

__global__ void __launch_bounds__(PlanTeam::kLanes, 1)
    plan_spill_kernel(SpillProblem problem, SpillResult result, void* global, int32_t* errors) {
  __shared__ PlanTeam::Group group;
  PlanTeam team(group);
  const int64_t b = blockIdx.x, E = problem.E, R = problem.R, P = R * problem.S;
  problem.loads += b * problem.num_sources * E;
  if (problem.fixed) problem.fixed += b * R;
  if (problem.start) problem.start += b * P;
  problem.slot_to_expert += b * P;
  problem.home_slot += b * E;
  const SpillResult mine{result.slot_to_expert + b * P, result.quota + b * P, result.level + b,
                         result.telemetry + b * 5};
  void* const memory = block_workspace(global, SpillWorkspace::bytes(R, E, P));
  const SpillWorkspace workspace = SpillWorkspace::at(memory, R, E, P);
  Spill<PlanTeam> solver(team, problem, workspace, mine);
  if (solver.solve() == SpillStatus::ok) return;
  team.sync();
  team.for_each(static_cast<int>(P), [&](int p) {
    mine.slot_to_expert[p] = problem.slot_to_expert[p];
    mine.quota[p] = 0;
  });
  team.for_each(5, [&](int i) { mine.telemetry[i] = 0; });
  if (team.rank() > 0) return;
  *mine.level = -1;
  report(errors, kPlanSpill);
}

}  // namespace

int64_t plan_spill_bytes(int64_t B, int R, int E, int S) {
  return global_bytes(B, SpillWorkspace::bytes(R, E, int64_t(R) * S));
}

const char* plan_spill(const SpillProblem& problem, const SpillResult& result, int64_t B, void* global,
                       void* stream) {
  const int64_t P = int64_t(problem.R) * problem.S;
  const int64_t bytes = global ? 0 : SpillWorkspace::bytes(problem.R, problem.E, P);
  return launch(plan_spill_kernel, B, PlanTeam::kLanes, bytes, stream, problem, result, global, error_word());
}

}  // namespace isoload::cuda
