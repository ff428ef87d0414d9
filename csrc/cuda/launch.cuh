// What the shells share: a block's workspace, and a launch that says what went wrong.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/block_team.cuh"
#include "cuda/early_start.cuh"
#include "rank_set.h"

namespace isoload::cuda {

// A planner's block. Its steps run over at most a few hundred experts or slots: four warps take them in a few
// turns, and a barrier of four warps costs little more than that of one.
constexpr int kPlanWarps = 4;
using PlanTeam = BlockTeam<kPlanWarps, true>;

// The most dynamic shared memory that a block of this device may ask for, less what planners use besides.
inline int64_t shared_limit() {
  int device = 0, bytes = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return bytes - 1024;
}

// A block's part of a global buffer, so that the next one starts aligned.
__host__ __device__ inline int64_t padded(int64_t bytes) { return (bytes + 15) / 16 * 16; }

// Bytes of a global buffer for B blocks: 0 where a block's workspace fits into shared memory.
inline int64_t global_bytes(int64_t B, int64_t bytes) {
  return bytes <= shared_limit() ? 0 : B * padded(bytes);
}

extern __shared__ __align__(16) uint64_t shared_memory[];

// This block's workspace: its part of `global`, or shared memory if there is none.
__device__ inline void* block_workspace(void* global, int64_t bytes) {
  if (global == nullptr) return shared_memory;
  return static_cast<char*>(global) + blockIdx.x * padded(bytes);
}

// Nothing to do is no launch: a grid of 0 blocks is an error.
template <class... Parameters, class... Arguments>
const char* launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int64_t shared_bytes,
                   void* stream, const Arguments&... arguments) {
  if (blocks == 0) return nullptr;
  cudaError_t error = cudaSuccess;
  if (shared_bytes > 47 * 1024) {  // without asking there are 48 KB, static ones included
    // The same number on each call: what one thread asks for must not take from what another launches with.
    const int64_t limit = shared_limit(), most = shared_bytes > limit ? shared_bytes : limit;
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(most));
  }
  if (error == cudaSuccess) {
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    const cudaLaunchConfig_t config{static_cast<unsigned>(blocks),
                                    static_cast<unsigned>(threads),
                                    static_cast<std::size_t>(shared_bytes),
                                    static_cast<cudaStream_t>(stream),
                                    &early,
                                    starts_early(reinterpret_cast<const void*>(kernel))};
    error = cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
  }
  return refused(error);
}

// Notes the faults that a lane saw, bits of Fault, in the device's error word.
__device__ inline void report(int32_t* errors, int32_t faults) {
  if (faults != 0 && errors != nullptr) atomicOr(errors, faults);
}

}  // namespace isoload::cuda
