#include "algorithms/plan_own.h"
#include "cuda/planner.cuh"

ISOLOAD_PLANNER(plan_own, OwnPlanner, kPlanOwn)
