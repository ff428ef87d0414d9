// count: blocks count their part of the ids in shared memory, then add it up. Integer sums need no order.
#include "cuda/cuda.h"
#include "cuda/launch.cuh"

namespace isoload::cuda {
namespace {

constexpr int kThreads = 256, kPerThread = 8;  // 2048 ids hide what a block's counters cost
constexpr int kMostBlocks = 512;               // a few per multiprocessor

// counts [E] are 0 before. in_shared: a block's own counters fit.
template <class Id>
__global__ void __launch_bounds__(kThreads)
    count_kernel(const Id* ids, int64_t n, int E, int32_t* counts, bool in_shared) {
  int32_t* const mine = in_shared ? reinterpret_cast<int32_t*>(shared_memory) : counts;
  for (int e = threadIdx.x; in_shared && e < E; e += kThreads) mine[e] = 0;
  __syncthreads();
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i += step) {
    const Id id = ids[i];
    if (static_cast<uint64_t>(id) < static_cast<uint64_t>(E)) atomicAdd(&mine[id], 1);
  }
  if (!in_shared) return;
  __syncthreads();
  for (int e = threadIdx.x; e < E; e += kThreads)
    if (mine[e] > 0) atomicAdd(&counts[e], mine[e]);
}

}  // namespace

template <class Id>
const char* count(const Id* ids, int64_t n, int E, int32_t* counts, void* stream) {
  const cudaError_t error =
      cudaMemsetAsync(counts, 0, E * sizeof(int32_t), static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) return cudaGetErrorString(error);
  const int64_t wanted = (n + kThreads * kPerThread - 1) / (kThreads * kPerThread);
  const int64_t blocks = wanted < kMostBlocks ? wanted : kMostBlocks, bytes = E * int64_t(sizeof(int32_t));
  const bool in_shared = bytes <= 48 * 1024;
  return launch(count_kernel<Id>, blocks, kThreads, in_shared ? bytes : 0, stream, ids, n, E, counts,
                in_shared);
}

template const char* count(const int32_t*, int64_t, int, int32_t*, void*);
template const char* count(const int64_t*, int64_t, int, int32_t*, void*);

}  // namespace isoload::cuda
