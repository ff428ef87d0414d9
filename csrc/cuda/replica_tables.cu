// replica_tables: one block of four warps per layer of the batch.
#include "algorithms/replica_tables.h"
#include "cuda/cuda.h"
#include "cuda/launch.cuh"

namespace isoload::cuda {
namespace {

__global__ void __launch_bounds__(PlanTeam::kLanes, 1)
    replica_tables_kernel(const int32_t* slot_to_expert, int R, int E, int S, int32_t* tables, void* global) {
  __shared__ PlanTeam::Group group;
  PlanTeam team(group);
  const int64_t b = blockIdx.x, P = int64_t(R) * S, bytes = replica_tables_workspace(R, E) * sizeof(uint64_t);
  const auto mine = MutableReplicaTables::at(tables, E, P).layer(b, E, P);
  auto* const memory = static_cast<uint64_t*>(block_workspace(global, bytes));
  isoload::replica_tables(team, slot_to_expert + b * P, R, E, S, mine, memory);
}

int64_t block_bytes(int R, int E) { return replica_tables_workspace(R, E) * int64_t(sizeof(uint64_t)); }

}  // namespace

int64_t replica_tables_bytes(int64_t B, int R, int E) { return global_bytes(B, block_bytes(R, E)); }

const char* replica_tables(const int32_t* slot_to_expert, int64_t B, int R, int E, int S, int32_t* tables,
                           void* global, void* stream) {
  return launch(replica_tables_kernel, B, PlanTeam::kLanes, global ? 0 : block_bytes(R, E), stream,
                slot_to_expert, R, E, S, tables, global);
}

}  // namespace isoload::cuda
