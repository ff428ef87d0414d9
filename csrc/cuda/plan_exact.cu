#include "algorithms/plan_exact.h"
#include "cuda/planner.cuh"

ISOLOAD_PLANNER(plan_exact, ExactPlanner, kPlanExact)
