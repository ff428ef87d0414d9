#include "algorithms/plan_fill.h"
#include "cuda/planner.cuh"

ISOLOAD_FETCHED(plan_fill, LevelFillPlanner, PlanTeam, kPlanFill)
ISOLOAD_PLANNER(plan_fill, LevelFillPlanner, kPlanFill)
