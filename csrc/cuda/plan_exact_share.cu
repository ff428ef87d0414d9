// plan_exact_share: one block per layer of the batch.
#include "algorithms/plan_exact_share.h"
#include "cuda/fetched_plan.cuh"

ISOLOAD_FETCHED_PLANNER(plan_exact_share, ExactSharePlanner, kPlanExact)
