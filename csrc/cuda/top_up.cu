#include "algorithms/top_up.h"
#include "cuda/planner.cuh"

ISOLOAD_PLANNER(top_up, TopUpPlanner, kTopUp)
