// Inputs that a block reads over and over, a value at a time, brought into its shared memory first: global
// memory is then waited for once. A lane's loads do not keep it; it waits where the values are needed.
#pragma once

#include <cuda_pipeline_primitives.h>

#include <cstdint>

namespace isoload::cuda {

// from [n] to shared memory.
template <class Team>
__device__ void fetch(const Team& team, const int32_t* from, int64_t n, int32_t* to) {
  team.for_each(static_cast<int>(n),
                [&](int i) { __pipeline_memcpy_async(to + i, from + i, sizeof(int32_t)); });
}

// All that was fetched is there. A barrier.
template <class Team>
__device__ void wait_for_fetched(const Team& team) {
  __pipeline_commit();
  __pipeline_wait_prior(0);  // this lane's; the barrier for all
  team.sync();
}

}  // namespace isoload::cuda
