#include "algorithms/plan_active.h"
#include "cuda/planner.cuh"

ISOLOAD_PLANNER(plan_active, ActivePlanner, kPlanActive)
