#include "algorithms/shard_tokens.h"
#include "cuda/planner.cuh"

ISOLOAD_FETCHED(shard_tokens, ShardingPlanner, WideTeam, kShardTokens)
ISOLOAD_PLANNER(shard_tokens, ShardingPlanner, kShardTokens)
