#include "algorithms/top_up.h"
#include "cuda/planner.cuh"

ISOLOAD_FETCHED(top_up, TopUpPlanner, WideTeam, kTopUp)
ISOLOAD_PLANNER(top_up, TopUpPlanner, kTopUp)
