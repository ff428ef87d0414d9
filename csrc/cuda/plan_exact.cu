// plan_exact: one block per layer of the batch. A source rank's send_counts come with the plan from one
// kernel where the problem is plain and can be fetched; for others that of share follows, so that none grows
// beyond an instruction cache.
#include "algorithms/plan_exact.h"
#include "algorithms/plan_exact_share.h"
#include "cuda/fetched_plan.cuh"

ISOLOAD_FETCHED_PLANNER(plan_exact, ExactPlanner, kPlanExact)
ISOLOAD_FETCHED_KERNELS(plan_exact_share, ExactSharePlanner, kPlanExact)

namespace isoload::cuda {
namespace {

bool is_one_kernel(const ExactShareProblem& problem) {
  return is_plain(problem) && fits_fetched<ExactSharePlanner>(problem);
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
  return share(row, ShareOf::one_row, problem.rank, result.peak, result.send_counts, B, of_row, stream);
}

}  // namespace isoload::cuda
