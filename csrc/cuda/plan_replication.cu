#include "algorithms/plan_replication.h"
#include "cuda/planner.cuh"

ISOLOAD_FETCHED(plan_replication, ReplicationPlanner, WideTeam, kPlanReplication)
ISOLOAD_PLANNER(plan_replication, ReplicationPlanner, kPlanReplication)
