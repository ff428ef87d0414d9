#include "algorithms/share_alone.h"
#include "cuda/planner.cuh"

ISOLOAD_PLANNER(share_alone, ShareAlonePlanner, kShareAloneQuota)
