// plan_exact_share: one block per layer of the batch. Of one layer the block may gather the loads itself.
#include "algorithms/plan_exact_share.h"
#include "cuda/fetched_plan.cuh"

ISOLOAD_FETCHED_PLANNER(plan_exact_share, ExactSharePlanner, kPlanExact)

namespace isoload::cuda {
namespace {

// The next kernel is let start by plan_fetched, behind the wait for other GPUs.
__global__ void __launch_bounds__(FetchedTeam::kLanes, 1)
    plan_exact_share_gathered_kernel(RowGather gather, GatheredRows gathered, ExactShareProblem problem,
                                     ExactShareResult result, int32_t* errors) {
  __shared__ FetchedTeam::Group group;
  FetchedTeam team(group);
  wait_for_kernel_ahead();
  const int late = isoload::gather_rows(team, gather, gathered);
  if (late != 0 && team.rank() == 0) report(errors, kGatherRows);
  team.sync();  // the loads are those of all lanes
  plan_fetched<ExactSharePlanner, true>(team, problem, result, errors, kPlanExact);
}

}  // namespace

const char* plan_exact_share_gathered(const RowGather& gather, const GatheredRows& gathered,
                                      const ExactShareProblem& problem, const ExactShareResult& result,
                                      void* global, void* stream) {
  if (const int64_t bytes = fetched_bytes<ExactSharePlanner>(problem, global); bytes > 0 && is_plain(problem))
    return launch(plan_exact_share_gathered_kernel, 1, FetchedTeam::kLanes, bytes, stream, gather, gathered,
                  problem, result, error_word());
  if (const char* error = gather_rows(gather, gathered, stream)) return error;
  return plan<ExactSharePlanner>(problem, result, 1, global, stream);
}

}  // namespace isoload::cuda
