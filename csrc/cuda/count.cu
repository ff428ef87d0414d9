// count: of a few ids, every block counts a few experts and reads all ids: nothing has to be 0 before,
// nothing is added up after. Of more, blocks count their part of the ids in shared memory, then add it up;
// integer sums need no order.
#include "cuda/count.cuh"

namespace isoload::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMostBlocks = 512;  // a few per multiprocessor

template <class Id>
__global__ void __launch_bounds__(kAloneThreads)
    count_alone_kernel(const Id* ids, int64_t n, int E, int32_t* counts, int32_t* errors) {
  take_turn();
  const int32_t faults = count_group<Id>(ids, n, E, blockIdx.x, counts);
  if (blockIdx.x == 0) report(errors, faults);
}

// counts [E] are 0 before. kShared: a block's own counters fit.
template <bool kShared, class Id>
__global__ void __launch_bounds__(kThreads)
    count_kernel(const Id* ids, int64_t n, int E, int32_t* counts, int32_t* errors) {
  take_turn();
  auto* const mine = reinterpret_cast<int32_t*>(shared_memory);  // [E]
  for (int e = threadIdx.x; kShared && e < E; e += kThreads) mine[e] = 0;
  __syncthreads();
  int32_t faults = 0;
  for_ids<kThreads, Id>(ids, n, blockIdx.x, gridDim.x, [&](Id id) {
    faults |= fault(id, E);
    if (expert_of(id, E) >= 0) atomicAdd(kShared ? &mine[id] : &counts[id], 1);
  });
  report(errors, faults);
  if (!kShared) return;
  __syncthreads();
  for (int e = threadIdx.x; e < E; e += kThreads)
    if (mine[e] > 0) atomicAdd(&counts[e], mine[e]);
}

}  // namespace

template <class Id>
const char* count(const Id* ids, int64_t n, int E, int32_t* counts, void* stream) {
  if (few(n, E))
    return launch(count_alone_kernel<Id>, num_groups(E), kAloneThreads, 0, stream, ids, n, E, counts,
                  error_word());
  if (const char* error = clear(counts, E, stream)) return error;
  const int64_t wanted = (n + kThreads * kAhead - 1) / (kThreads * kAhead);
  const int64_t blocks = wanted < kMostBlocks ? wanted : kMostBlocks, bytes = E * int64_t(sizeof(int32_t));
  if (bytes > 48 * 1024)
    return launch(count_kernel<false, Id>, blocks, kThreads, 0, stream, ids, n, E, counts, error_word());
  return launch(count_kernel<true, Id>, blocks, kThreads, bytes, stream, ids, n, E, counts, error_word());
}

template const char* count(const int32_t*, int64_t, int, int32_t*, void*);
template const char* count(const int64_t*, int64_t, int, int32_t*, void*);

}  // namespace isoload::cuda
