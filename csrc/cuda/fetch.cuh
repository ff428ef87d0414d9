// Inputs that a block reads over and over, a value at a time, brought into its shared memory first: global
// memory is then waited for once. A lane's loads do not keep it; it waits where the values are needed.
#pragma once

#include <cuda_pipeline_primitives.h>

#include <cstdint>

namespace isoload::cuda {

// from [n] to shared memory; four at a time where both ends are aligned.
template <class Team>
__device__ void fetch(const Team& team, const int32_t* from, int64_t n, int32_t* to) {
  const uintptr_t ends = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to);
  const int fours = ends % 16 == 0 ? static_cast<int>(n / 4) : 0;
  team.for_each(fours, [&](int i) { __pipeline_memcpy_async(to + i * 4, from + i * 4, 16); });
  team.for_each(static_cast<int>(n) - fours * 4, [&](int i) {
    __pipeline_memcpy_async(to + fours * 4 + i, from + fours * 4 + i, sizeof(int32_t));
  });
}

// All that was fetched is there. A barrier.
template <class Team>
__device__ void wait_for_fetched(const Team& team) {
  __pipeline_commit();
  __pipeline_wait_prior(0);  // this lane's; the barrier for all
  team.sync();
}

}  // namespace isoload::cuda
