#include "algorithms/shard_tokens.h"
#include "cuda/planner.cuh"

ISOLOAD_PLANNER(shard_tokens, ShardingPlanner, kShardTokens)
