// plan_exact_share: one block per layer of the batch. Of plain problems that can be fetched; for others the
// kernels of plan_exact and share run, so that none grows beyond an instruction cache. Of one layer the block
// may gather the loads itself.
#include "algorithms/plan_exact_share.h"
#include "cuda/fetched_plan.cuh"

ISOLOAD_FETCHED_KERNELS(plan_exact_share, ExactSharePlanner, kPlanExact)

namespace isoload::cuda {

// Of plan_exact.cu.
extern template int64_t plan_bytes<ExactPlanner>(const ExactProblem&, int64_t);
extern template const char* plan<ExactPlanner>(const ExactProblem&, const ExactResult&, int64_t, void*,
                                               void*);

namespace {

bool is_one_kernel(const ExactShareProblem& problem) {
  return is_plain(problem) && fits_fetched<ExactSharePlanner>(problem);
}

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

template <>
int64_t plan_bytes<ExactSharePlanner>(const ExactShareProblem& problem, int64_t B) {
  if (is_one_kernel(problem)) return 0;
  const int64_t plan = plan_bytes<ExactPlanner>(problem, B);
  const int64_t row = share_bytes(ExactSharePlanner::share_of(problem), ShareOf::one_row, B);
  return plan > row ? plan : row;
}

template <>
const char* plan<ExactSharePlanner>(const ExactShareProblem& problem, const ExactShareResult& result,
                                    int64_t B, void* global, void* stream) {
  if (is_one_kernel(problem))
    return FetchedKernels<ExactSharePlanner>::launch<true>(problem, result, B, stream);
  void* const of_plan = plan_bytes<ExactPlanner>(problem, B) > 0 ? global : nullptr;
  if (const char* refused = plan<ExactPlanner>(problem, result, B, of_plan, stream)) return refused;
  ShareProblem row = ExactSharePlanner::share_of(problem);
  row.quota = result.quota;
  void* const of_row = share_bytes(row, ShareOf::one_row, B) > 0 ? global : nullptr;
  return share(row, ShareOf::one_row, problem.rank, result.peak, result.row, B, of_row, stream);
}

const char* plan_exact_share_gathered(const RowGather& gather, const GatheredRows& gathered,
                                      const ExactShareProblem& problem, const ExactShareResult& result,
                                      void* global, void* stream) {
  if (is_one_kernel(problem))
    return launch(plan_exact_share_gathered_kernel, 1, FetchedTeam::kLanes,
                  FetchedSizes::of<ExactSharePlanner>(problem).bytes(), stream, gather, gathered, problem,
                  result, error_word());
  if (const char* error = gather_rows(gather, gathered, stream)) return error;
  return plan<ExactSharePlanner>(problem, result, 1, global, stream);
}

}  // namespace isoload::cuda
