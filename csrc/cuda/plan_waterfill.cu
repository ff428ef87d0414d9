#include "algorithms/plan_waterfill.h"
#include "cuda/planner.cuh"

ISOLOAD_PLANNER(plan_waterfill, WaterfillPlanner, kPlanWaterfill)
