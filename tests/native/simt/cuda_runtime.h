// In the place of CUDA's header: what csrc/cuda uses of CUDA, by the names it has there. See machine.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "block.h"
#include "machine.h"

#define __host__
#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__ static thread_local  // which gives them a place of their own, also in templates
#define __launch_bounds__(...)
#define SIMT_INLINE __attribute__((always_inline)) inline  // so that a return address is the kernel's

#define threadIdx simt::thread_index()
#define blockIdx simt::block_index()
#define blockDim simt::block_size()
#define gridDim simt::grid_size()

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
enum cudaDeviceAttr { cudaDevAttrMaxSharedMemoryPerBlockOptin };
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  return *value = static_cast<int>(simt::machine.shared_limit), cudaSuccess;
}
template <class T>
cudaError_t cudaGetSymbolAddress(void** address, T& symbol) {
  return *address = &symbol, cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* p, int value, std::size_t bytes, cudaStream_t) {
  ++simt::machine.memsets;
  std::memset(p, value, bytes);
  return cudaSuccess;
}
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed };
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "refused"; }
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) {
  return cudaSuccess;
}
struct cudaFuncAttributes {
  int ptxVersion;
};
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* of, const void*) {
  return of->ptxVersion = 90, cudaSuccess;
}
inline cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  unsigned blocks, lanes;
  std::size_t shared_bytes;
  cudaStream_t stream;
  const cudaLaunchAttribute* attributes;
  unsigned num_attributes;
};
// Runs kernel(arguments...) in every lane of every block. A lane reads its arguments from the host's stack,
// which costs nothing and races with nothing, as CUDA's constant bank does.
template <class... Parameters>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Parameters... arguments) {
  simt::machine.early =
      config->num_attributes > 0 && config->attributes->val.programmaticStreamSerializationAllowed;
  auto call = [&] { kernel(arguments...); };
  simt::run_grid(
      reinterpret_cast<void*>(kernel), config->blocks, static_cast<int>(config->lanes),
      static_cast<int64_t>(config->shared_bytes),
      [](void* closure) { (*static_cast<decltype(call)*>(closure))(); }, &call);
  return cudaSuccess;
}
SIMT_INLINE void cudaGridDependencySynchronize() { simt::wait_for_kernel_ahead(); }
SIMT_INLINE void cudaTriggerProgrammaticLaunchCompletion() { simt::let_next_kernel_start(); }

namespace simt {

// f of what the lanes in mask give, [32].
template <class T, class F>
SIMT_INLINE auto exchange(unsigned mask, T v, F&& f) {
  static_assert(sizeof(T) <= 8);
  uint64_t word = 0;
  std::memcpy(&word, &v, sizeof(T));
  const uint64_t* const words = exchange(mask, word);
  T all[32];
  for (int i = 0; i < 32; ++i) std::memcpy(&all[i], &words[i], sizeof(T));
  return f(all);
}

// The values of the lanes in mask, folded.
template <class T, class F>
SIMT_INLINE T reduce(unsigned mask, T v, F&& combine) {
  return exchange(mask, v, [&](const T* all) {
    T folded = v;
    for (int i = 0; i < 32; ++i)
      if (mask >> i & 1) folded = combine(folded, all[i]);
    return folded;
  });
}

}  // namespace simt

SIMT_INLINE void __syncthreads() { simt::meet(simt::Meeting::block, ~0u); }
SIMT_INLINE int __syncthreads_or(int b) { return simt::meet_any(b != 0); }
inline void __threadfence() {}  // blocks run one after another
SIMT_INLINE void __syncwarp(unsigned mask = ~0u) { simt::meet(simt::Meeting::warp, mask); }
template <class T>
SIMT_INLINE T __shfl_sync(unsigned mask, T v, int from) {
  return simt::exchange(mask, v, [&](const T* all) { return all[from]; });
}
template <class T>
SIMT_INLINE T __shfl_xor_sync(unsigned mask, T v, int with) {
  return simt::exchange(mask, v, [&](const T* all) { return all[(threadIdx.x % 32) ^ with]; });
}
template <class T>
SIMT_INLINE T __shfl_up_sync(unsigned mask, T v, int by) {
  const int lane = threadIdx.x % 32;
  return simt::exchange(mask, v, [&](const T* all) { return all[lane < by ? lane : lane - by]; });
}
template <class T>
SIMT_INLINE T __reduce_max_sync(unsigned mask, T v) {
  return simt::reduce(mask, v, [](T a, T b) { return a > b ? a : b; });
}
template <class T>
SIMT_INLINE T __reduce_add_sync(unsigned mask, T v) {
  return simt::exchange(mask, v, [&](const T* all) {
    T sum = 0;
    for (int i = 0; i < 32; ++i) sum += mask >> i & 1 ? all[i] : 0;
    return sum;
  });
}
SIMT_INLINE unsigned __reduce_or_sync(unsigned mask, unsigned v) {
  return simt::reduce(mask, v, [](unsigned a, unsigned b) { return a | b; });
}
SIMT_INLINE unsigned __ballot_sync(unsigned mask, bool v) {
  return mask & simt::exchange(mask, unsigned(v), [&](const unsigned* all) {
           unsigned set = 0;
           for (int i = 0; i < 32; ++i) set |= all[i] << i;
           return set;
         });
}
SIMT_INLINE unsigned __match_any_sync(unsigned mask, int v) {
  return mask & simt::exchange(mask, v, [&](const int* all) {
           unsigned same = 0;
           for (int i = 0; i < 32; ++i) same |= unsigned(all[i] == v) << i;
           return same;
         });
}
SIMT_INLINE int atomicAdd(int* p, int v) { return simt::atomic_add(p, v); }
SIMT_INLINE int atomicOr(int* p, int v) { return simt::atomic_or(p, v); }
SIMT_INLINE int atomicExch(int* p, int v) { return simt::atomic_exchange(p, v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(uint64_t v) { return __builtin_popcountll(v); }
