// gather_rows: one block, since it waits for what no other block of this GPU does.
#include "algorithms/gather_rows.h"
#include "cuda/cuda.h"
#include "cuda/launch.cuh"

namespace isoload::cuda {
namespace {

using GatherTeam = BlockTeam<16, true>;

__global__ void __launch_bounds__(GatherTeam::kLanes, 1)
    gather_rows_kernel(RowGather in, GatheredRows out, int32_t* errors) {
  wait_for_kernel_ahead();
  __shared__ GatherTeam::Group group;
  GatherTeam team(group);
  const int late = isoload::gather_rows(team, in, out);
  if (late != 0 && team.rank() == 0) report(errors, kGatherRows);
}

}  // namespace

const char* gather_rows(const RowGather& in, const GatheredRows& out, void* stream) {
  return launch(gather_rows_kernel, 1, GatherTeam::kLanes, 0, stream, in, out, error_word());
}

}  // namespace isoload::cuda
