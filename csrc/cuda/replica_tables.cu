#include "algorithms/replica_tables.h"
#include "cuda/planner.cuh"

ISOLOAD_PLANNER(replica_tables, TablesPlanner, Fault())  // refuses nothing
