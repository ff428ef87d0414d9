// plan_exact_share: one block per layer of the batch, where it can be fetched; else two kernels, those of
// plan_exact and share.
#include "algorithms/plan_exact_share.h"

#include "cuda/fetched_plan.cuh"

ISOLOAD_FETCHED_KERNELS(plan_exact_share, ExactSharePlanner, kPlanExact)

namespace isoload::cuda {

// Of plan_exact.cu.
extern template int64_t plan_bytes<ExactPlanner>(const ExactProblem&, int64_t);
extern template const char* plan<ExactPlanner>(const ExactProblem&, const ExactResult&, int64_t, void*,
                                               void*);

template <>
int64_t plan_bytes<ExactSharePlanner>(const ExactShareProblem& problem, int64_t B) {
  if (fits_fetched<ExactSharePlanner>(problem)) return 0;
  const int64_t plan = plan_bytes<ExactPlanner>(problem, B);
  const int64_t row = share_bytes(ExactSharePlanner::share_of(problem), ShareOf::one_row, B);
  return plan > row ? plan : row;
}

template <>
const char* plan<ExactSharePlanner>(const ExactShareProblem& problem, const ExactShareResult& result,
                                    int64_t B, void* global, void* stream) {
  if (fits_fetched<ExactSharePlanner>(problem))
    return FetchedKernels<ExactSharePlanner>::launch(problem, result, B, stream);
  void* const of_plan = plan_bytes<ExactPlanner>(problem, B) > 0 ? global : nullptr;
  if (const char* refused = plan<ExactPlanner>(problem, result, B, of_plan, stream)) return refused;
  ShareProblem row = ExactSharePlanner::share_of(problem);
  row.quota = result.quota;
  void* const of_row = share_bytes(row, ShareOf::one_row, B) > 0 ? global : nullptr;
  return share(row, ShareOf::one_row, problem.rank, result.peak, result.row, B, of_row, stream);
}

}  // namespace isoload::cuda
