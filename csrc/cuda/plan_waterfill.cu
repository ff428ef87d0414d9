// plan_waterfill: one block of four warps per layer of the batch.
#include "algorithms/plan_waterfill.h"
#include "cuda/cuda.h"
#include "cuda/launch.cuh"

namespace isoload::cuda {
namespace {

template <int W>
__global__ void __launch_bounds__(PlanTeam::kLanes, 1)
    plan_waterfill_kernel(WaterfillProblem problem, WaterfillResult result, void* global, int32_t* errors) {
  __shared__ PlanTeam::Group group;
  PlanTeam team(group);
  const int64_t b = blockIdx.x, R = problem.R;
  problem.copies += b * R * R;
  problem.tokens += b * R;
  const WaterfillResult mine{result.share + b * R * R, result.peak + b, result.bound + b};
  void* const memory = block_workspace(global, WaterfillWorkspace<W>::bytes(R));
  Waterfill<W, PlanTeam> solver(team, problem, WaterfillWorkspace<W>::at(memory, R), mine);
  if (solver.solve() == WaterfillStatus::ok) return;
  refuse(team, mine.share, R * R, mine.peak, mine.bound);
  if (team.rank() == 0) report(errors, kPlanWaterfill);
}

}  // namespace

int64_t plan_waterfill_bytes(int64_t B, int R) {
  return with_words(R, [&](auto W) { return global_bytes(B, WaterfillWorkspace<W>::bytes(R)); });
}

const char* plan_waterfill(const WaterfillProblem& problem, const WaterfillResult& result, int64_t B,
                           void* global, void* stream) {
  return with_words(problem.R, [&](auto W) {
    const int64_t bytes = global ? 0 : WaterfillWorkspace<W>::bytes(problem.R);
    return launch(plan_waterfill_kernel<W>, B, PlanTeam::kLanes, bytes, stream, problem, result, global,
                  error_word());
  });
}

}  // namespace isoload::cuda
