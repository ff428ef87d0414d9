// Asynchronous copies: the bytes arrive when the lane waits for them.
#pragma once

#include <cstddef>

#include "cuda_runtime.h"

SIMT_INLINE void __pipeline_memcpy_async(void* to, const void* from, std::size_t bytes) {
  simt::copy_async(to, from, bytes);
}
inline void __pipeline_commit() {}
// Of all commits: csrc waits for no fewer.
SIMT_INLINE void __pipeline_wait_prior(std::size_t) { simt::wait_for_copies(); }
