// count: of a few ids, every block counts a few experts and reads all ids: nothing has to be 0 before,
// nothing is added up after. Of more, blocks count their part of the ids in shared memory, then add it up;
// integer sums need no order.
//
// count_numbered: a block per part of the tokens, whose warps take their own runs of copies in order.
#include "cuda/cuda.h"
#include "cuda/stable_rank.cuh"

namespace isoload::cuda {
namespace {

constexpr int kAhead = 8;                                // loads of a lane on their way at once
constexpr int kAloneThreads = 1024, kAloneExperts = 32;  // a block's part of the experts, its shared atomics
constexpr int kMostAlone = 32;                           // blocks that read all ids
constexpr int64_t kMostAloneIds = kAloneThreads * kAhead;
constexpr int kThreads = 256;
constexpr int kMostBlocks = 512;  // a few per multiprocessor
constexpr int kNumberWarps = 32, kTurns = 2;
constexpr int kPieces = 4, kMostRuns = kNumberWarps / kPieces;

template <class Id>
__device__ int32_t fault(Id id, int E) {
  return expert_of(id, E) >= 0 || id == -1 ? 0 : kCountId;
}

// use(id) of this block's share of the ids [n], and of -1: `blocks` blocks of kLanes take turns.
template <int kLanes, class Id, class Use>
__device__ void for_ids(const Id* ids, int64_t n, int64_t block, int64_t blocks, Use&& use) {
  constexpr int64_t kTile = kLanes * kAhead;
  for (int64_t i = block * kTile + threadIdx.x; i < n; i += blocks * kTile) {
    Id id[kAhead];
    fetch_ahead<kLanes>(ids + i, static_cast<int>(n - i), id);
#pragma unroll
    for (int a = 0; a < kAhead; ++a) use(id[a]);
  }
}

template <class Id>
__global__ void __launch_bounds__(kAloneThreads)
    count_alone_kernel(const Id* ids, int64_t n, int E, int32_t* counts, int32_t* errors) {
  __shared__ int32_t mine[kAloneExperts];
  const int first = blockIdx.x * kAloneExperts;
  const int here = E - first < kAloneExperts ? E - first : kAloneExperts;
  if (threadIdx.x < kAloneExperts) mine[threadIdx.x] = 0;
  __syncthreads();
  int32_t faults = 0;
  for_ids<kAloneThreads>(ids, n, 0, 1, [&](Id id) {
    faults |= fault(id, E);
    if (id >= first && id < first + here) atomicAdd(&mine[id - first], 1);
  });
  __syncthreads();
  if (threadIdx.x < here) counts[first + threadIdx.x] = mine[threadIdx.x];
  if (blockIdx.x == 0) report(errors, faults);
}

// counts [E] are 0 before. kShared: a block's own counters fit.
template <bool kShared, class Id>
__global__ void __launch_bounds__(kThreads)
    count_kernel(const Id* ids, int64_t n, int E, int32_t* counts, int32_t* errors) {
  auto* const mine = reinterpret_cast<int32_t*>(shared_memory);  // [E]
  for (int e = threadIdx.x; kShared && e < E; e += kThreads) mine[e] = 0;
  __syncthreads();
  int32_t faults = 0;
  for_ids<kThreads>(ids, n, blockIdx.x, gridDim.x, [&](Id id) {
    faults |= fault(id, E);
    if (expert_of(id, E) >= 0) atomicAdd(kShared ? &mine[id] : &counts[id], 1);
  });
  report(errors, faults);
  if (!kShared) return;
  __syncthreads();
  for (int e = threadIdx.x; e < E; e += kThreads)
    if (mine[e] > 0) atomicAdd(&counts[e], mine[e]);
}

__host__ __device__ constexpr int row_stride(int E) { return E | 1; }

// next, how often each warp has an expert, becomes how often it came before the warp: `before` [E], which
// goes on behind the last. kPieces lanes take an expert, a run of warps each. A row is `stride` long: no
// multiple of the banks, which the pieces would all meet in.
__device__ void add_up(int warps, int E, int stride, int32_t* before, int32_t* next) {
  const unsigned all = 0xffffffffu;
  const int piece = threadIdx.x % kPieces, runs = (warps + kPieces - 1) / kPieces;
  for (int first = 0; first < E; first += blockDim.x / kPieces) {
    const int e = first + threadIdx.x / kPieces;
    int32_t here[kMostRuns], sum = 0;
#pragma unroll
    for (int a = 0; a < kMostRuns; ++a) {
      const int warp = piece * runs + a;
      here[a] = a < runs && warp < warps && e < E ? next[warp * stride + e] : 0;
    }
#pragma unroll
    for (int a = 0; a < kMostRuns; ++a) sum += here[a];
    int32_t upto = sum;
    for (int far = 1; far < kPieces; far *= 2) {
      const int32_t other = __shfl_up_sync(all, upto, far);
      if (piece >= far) upto += other;
    }
    if (e < E) upto += before[e];
    __syncwarp();  // all have read
    int32_t sum_before = upto - sum;
#pragma unroll
    for (int a = 0; a < kMostRuns; ++a) {
      const int warp = piece * runs + a;
      if (a < runs && warp < warps && e < E) next[warp * stride + e] = sum_before;
      sum_before += here[a];
    }
    if (e < E && piece == kPieces - 1) before[e] = upto;
  }
}

// The numbers of the copies [begin, end), kTurns times the block's lanes at most. before [E]: copies of the
// part so far; next [warps, stride]. Ends with a barrier.
template <class Id>
__device__ int32_t number_copies(const Id* ids, int64_t begin, int64_t end, int E, int32_t* before,
                                 int32_t* next, int32_t* numbers) {
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  const unsigned all = 0xffffffffu, before_me = (1u << lane) - 1;
  const int64_t mine = begin + threadIdx.x / 32 * (32 * kTurns) + lane;
  const int stride = row_stride(E);
  int32_t* const here = next + threadIdx.x / 32 * stride;
  Id id[kTurns];
  fetch_ahead<32>(ids + mine, static_cast<int>(end - mine), id);
  for (int i = threadIdx.x; i < warps * stride; i += blockDim.x) next[i] = 0;
  __syncthreads();
  int32_t number[kTurns], faults = 0;
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    faults |= fault(id[t], E);
    const int e = expert_of(id[t], E);
    const unsigned peers = __match_any_sync(all, e);
    const int32_t held = e >= 0 ? here[e] : 0;
    __syncwarp();  // all have read the counter
    if (e >= 0 && (peers & before_me) == 0) here[e] = held + __popc(peers);
    __syncwarp();
    number[t] = e >= 0 ? held + __popc(peers & before_me) : -1;
  }
  __syncthreads();
  add_up(warps, E, stride, before, next);
  __syncthreads();
#pragma unroll
  for (int t = 0; t < kTurns; ++t)
    if (number[t] >= 0) number[t] += here[id[t]];
#pragma unroll
  for (int t = 0; t < kTurns; ++t)
    if (mine + 32 * t < end) numbers[mine + 32 * t] = number[t];
  __syncthreads();
  return faults;
}

// alone: this block's part is all there is; else counts [E] are 0 before.
template <class Id>
__global__ void __launch_bounds__(kNumberWarps * 32)
    count_numbered_kernel(const Id* ids, int64_t n, int64_t part, int E, bool alone, int32_t* counts,
                          int32_t* numbers, int32_t* parts, int32_t* errors) {
  auto* const before = reinterpret_cast<int32_t*>(shared_memory);  // [E]
  const int64_t begin = blockIdx.x * part, end = begin + part < n ? begin + part : n;
  for (int e = threadIdx.x; e < E; e += blockDim.x) before[e] = 0;
  int32_t faults = 0;
  const int64_t step = int64_t(blockDim.x) * kTurns;
  for (int64_t i = begin; i < end; i += step)
    faults |= number_copies(ids, i, end, E, before, before + E, numbers);
  report(errors, faults);
  for (int e = threadIdx.x; e < E; e += blockDim.x) {
    parts[int64_t(blockIdx.x) * E + e] = before[e];
    if (alone)
      counts[e] = before[e];
    else if (before[e] > 0)
      atomicAdd(&counts[e], before[e]);
  }
}

const char* clear(int32_t* counts, int E, void* stream) {
  return refused(cudaMemsetAsync(counts, 0, E * sizeof(int32_t), static_cast<cudaStream_t>(stream)));
}

}  // namespace

template <class Id>
const char* count(const Id* ids, int64_t n, int E, int32_t* counts, void* stream) {
  if (n <= kMostAloneIds && E <= kMostAlone * kAloneExperts)
    return launch(count_alone_kernel<Id>, (E + kAloneExperts - 1) / kAloneExperts, kAloneThreads, 0, stream,
                  ids, n, E, counts, error_word());
  if (const char* error = clear(counts, E, stream)) return error;
  const int64_t wanted = (n + kThreads * kAhead - 1) / (kThreads * kAhead);
  const int64_t blocks = wanted < kMostBlocks ? wanted : kMostBlocks, bytes = E * int64_t(sizeof(int32_t));
  if (bytes > 48 * 1024)
    return launch(count_kernel<false, Id>, blocks, kThreads, 0, stream, ids, n, E, counts, error_word());
  return launch(count_kernel<true, Id>, blocks, kThreads, bytes, stream, ids, n, E, counts, error_word());
}

template const char* count(const int32_t*, int64_t, int, int32_t*, void*);
template const char* count(const int64_t*, int64_t, int, int32_t*, void*);

template <class Id>
const char* count_numbered(const Id* ids, int64_t T, int K, int E, int32_t* counts, int32_t* numbers,
                           int32_t* parts, void* stream) {
  const int warps = rank_warps(row_stride(E), kNumberWarps, 1);
  if (warps == 0) return "more experts than a block can count";
  const int64_t blocks = cpu::num_parts(T);
  if (blocks != 1)
    if (const char* error = clear(counts, E, stream)) return error;
  return launch(count_numbered_kernel<Id>, blocks, warps * 32,
                (warps + 1) * row_stride(E) * int64_t(sizeof(int32_t)), stream, ids, T * K,
                cpu::kPartRows * K, E, blocks == 1, counts, numbers, parts, error_word());
}

template const char* count_numbered(const int32_t*, int64_t, int, int, int32_t*, int32_t*, int32_t*, void*);
template const char* count_numbered(const int64_t*, int64_t, int, int, int32_t*, int32_t*, int32_t*, void*);

}  // namespace isoload::cuda
