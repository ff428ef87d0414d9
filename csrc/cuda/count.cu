// count: of a few ids, every block counts a few experts and reads all ids: nothing has to be 0 before,
// nothing is added up after. Of more, blocks count their part of the ids in shared memory, then add it up;
// integer sums need no order.
#include "cuda/cuda.h"
#include "cuda/stable_rank.cuh"

namespace isoload::cuda {
namespace {

constexpr int kAhead = 8;
constexpr int kAloneThreads = 1024, kAloneExperts = 32;  // a block's part of the experts, its shared atomics
constexpr int kMostAlone = 32;                           // blocks that read all ids
constexpr int kThreads = 256, kPerThread = 8;            // 2048 ids hide what a block's counters cost
constexpr int kMostBlocks = 512;                         // a few per multiprocessor

template <class Id>
__device__ bool in_range(Id id, int E) {
  return static_cast<uint64_t>(id) < static_cast<uint64_t>(E);
}
template <class Id>
__device__ int32_t fault(Id id, int E) {
  return in_range(id, E) || id == -1 ? 0 : kCountId;
}

template <class Id>
__global__ void __launch_bounds__(kAloneThreads)
    count_alone_kernel(const Id* ids, int64_t n, int E, int32_t* counts, int32_t* errors) {
  __shared__ int32_t mine[kAloneExperts];
  const int first = blockIdx.x * kAloneExperts;
  const int here = E - first < kAloneExperts ? E - first : kAloneExperts;
  int32_t faults = 0;
  auto expert = [&](int64_t i) {
    const Id id = ids[i];
    faults |= fault(id, E);
    return id >= first && id < first + here ? static_cast<int>(id - first) : -1;
  };
  count_keys<kAhead>(0, n, here, expert, mine);
  if (threadIdx.x < here) counts[first + threadIdx.x] = mine[threadIdx.x];
  if (blockIdx.x == 0) report(errors, faults);
}

// counts [E] are 0 before. in_shared: a block's own counters fit.
template <class Id>
__global__ void __launch_bounds__(kThreads)
    count_kernel(const Id* ids, int64_t n, int E, int32_t* counts, bool in_shared, int32_t* errors) {
  int32_t* const mine = in_shared ? reinterpret_cast<int32_t*>(shared_memory) : counts;
  for (int e = threadIdx.x; in_shared && e < E; e += kThreads) mine[e] = 0;
  __syncthreads();
  int32_t faults = 0;
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i += step) {
    const Id id = ids[i];
    faults |= fault(id, E);
    if (in_range(id, E)) atomicAdd(&mine[id], 1);
  }
  report(errors, faults);
  if (!in_shared) return;
  __syncthreads();
  for (int e = threadIdx.x; e < E; e += kThreads)
    if (mine[e] > 0) atomicAdd(&counts[e], mine[e]);
}

}  // namespace

template <class Id>
const char* count(const Id* ids, int64_t n, int E, int32_t* counts, void* stream) {
  if (n <= kFewItems && E <= kMostAlone * kAloneExperts)
    return launch(count_alone_kernel<Id>, (E + kAloneExperts - 1) / kAloneExperts, kAloneThreads, 0, stream,
                  ids, n, E, counts, error_word());
  const cudaError_t error =
      cudaMemsetAsync(counts, 0, E * sizeof(int32_t), static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) return refused(error);
  const int64_t wanted = (n + kThreads * kPerThread - 1) / (kThreads * kPerThread);
  const int64_t blocks = wanted < kMostBlocks ? wanted : kMostBlocks, bytes = E * int64_t(sizeof(int32_t));
  const bool in_shared = bytes <= 48 * 1024;
  return launch(count_kernel<Id>, blocks, kThreads, in_shared ? bytes : 0, stream, ids, n, E, counts,
                in_shared, error_word());
}

template const char* count(const int32_t*, int64_t, int, int32_t*, void*);
template const char* count(const int64_t*, int64_t, int, int32_t*, void*);

}  // namespace isoload::cuda
