#include "algorithms/plan_replication.h"
#include "cuda/planner.cuh"

ISOLOAD_PLANNER(plan_replication, ReplicationPlanner, kPlanReplication)
