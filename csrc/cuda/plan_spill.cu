#include "algorithms/plan_spill.h"
#include "cuda/planner.cuh"

ISOLOAD_FETCHED(plan_spill, SpillPlanner, PlanTeam, kPlanSpill)
ISOLOAD_PLANNER(plan_spill, SpillPlanner, kPlanSpill)
