#include "algorithms/share.h"
#include "cuda/planner.cuh"

ISOLOAD_FETCHED(share, SharePlanner, WideTeam, kShareQuota)
ISOLOAD_PLANNER(share, SharePlanner, kShareQuota)
