// A source rank's send_counts come with the plan from one kernel where the problem is plain and can be
// fetched; for others that of share follows, so that none grows beyond an instruction cache.
#include "algorithms/plan_exact.h"
#include "algorithms/plan_exact_share.h"
#include "cuda/planner.cuh"

ISOLOAD_FETCHED(plan_exact, ExactPlanner, WideTeam, kPlanExact)
ISOLOAD_PLANNER(plan_exact, ExactPlanner, kPlanExact)
ISOLOAD_FETCHED(plan_exact_share, ExactSharePlanner, WideTeam, kPlanExact)

namespace isoload::cuda {

ISOLOAD_LAUNCHER(extern, SharePlanner)  // of share.cu

namespace {

bool is_one_kernel(const ExactShareProblem& problem) {
  return ExactPlanner::is_plain(problem) && fits_fetched<ExactSharePlanner>(problem);
}

}  // namespace

template <>
int64_t plan_bytes<ExactSharePlanner>(const ExactShareProblem& problem, int64_t B) {
  if (is_one_kernel(problem)) return 0;
  const int64_t plan = plan_bytes<ExactPlanner>(problem, B);
  const int64_t row = plan_bytes<SharePlanner>(ExactSharePlanner::share_of(problem, {}), B);
  return plan > row ? plan : row;
}

template <>
const char* plan<ExactSharePlanner>(const ExactShareProblem& problem, const ExactShareResult& result,
                                    int64_t B, void* global, void* stream) {
  if (is_one_kernel(problem)) return launch_fetched<ExactSharePlanner, true>(problem, result, B, stream);
  void* const of_plan = plan_bytes<ExactPlanner>(problem, B) > 0 ? global : nullptr;
  if (const char* refused = plan<ExactPlanner>(problem, result, B, of_plan, stream)) return refused;
  const ShareProblem row = ExactSharePlanner::share_of(problem, result);
  void* const of_row = plan_bytes<SharePlanner>(row, B) > 0 ? global : nullptr;
  return plan<SharePlanner>(row, result.send_counts, B, of_row, stream);
}

}  // namespace isoload::cuda
