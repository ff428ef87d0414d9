// plan_exact: one block per layer of the batch.
#include "algorithms/plan_exact.h"
#include "cuda/fetched_plan.cuh"

ISOLOAD_FETCHED_PLANNER(plan_exact, ExactPlanner, kPlanExact)
