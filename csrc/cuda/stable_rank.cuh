// stable_rank: how many items with the same key come before each, over a whole grid, in order.
//
// No block waits for another: what came before its own chunk a block adds up from what a kernel before
// counted per chunk; of one chunk there is nothing before. So the i-th copy of an expert is the same copy as
// in a loop over all of them.
#pragma once

#include "cuda/launch.cuh"

namespace isoload::cuda {

constexpr int kRankWarps = 8;         // of a block that counts its chunk
constexpr int kMostWarps = 32;        // of one that also reads what others count, many loads at a time
constexpr int64_t kMostChunks = 128;  // a block reads the counts of all blocks before it: bounded

// The items [0, n) cut into one chunk per block, each a multiple of what its warps take at a time.
struct Chunks {
  int64_t n, size;

  static Chunks of(int64_t n) {
    const int64_t least = kMostWarps * 32, equal = (n + kMostChunks - 1) / kMostChunks;
    return {n, (((equal > least ? equal : least) + least - 1) / least) * least};
  }
  __host__ __device__ int64_t count() const { return (n + size - 1) / size; }
  __device__ int64_t begin(int64_t block) const { return block * size; }
  __device__ int64_t end(int64_t block) const { return begin(block) + size < n ? begin(block) + size : n; }
};

// Warps, at most `most`, of a block that ranks `keys` keys and holds `besides` more counters of each; 0 if
// the counters of a single one do not fit.
inline int rank_warps(int64_t keys, int most, int besides) {
  int warps = most;
  while (warps > 0 && (warps + besides) * keys * int64_t(sizeof(int32_t)) > shared_limit()) warps /= 2;
  return warps;
}

// The ids at 0, kStep, ... below left, all asked for before the first is looked at; -1 beyond. Constant steps
// are part of the loads: a few addresses to work out would keep the compiler from asking for all at once.
template <int kStep, int kAhead, class Id>
__device__ void fetch_ahead(const Id* ids, int left, Id (&fetched)[kAhead]) {
#pragma unroll
  for (int a = 0; a < kAhead; ++a) fetched[a] = a * kStep < left ? ids[a * kStep] : Id(-1);
}

// An id as an expert; -1 for a masked copy, and for an id that is none.
template <class Id>
__device__ int expert_of(Id id, int E) {
  return static_cast<uint64_t>(id) < static_cast<uint64_t>(E) ? static_cast<int>(id) : -1;
}

// How often the items [begin, end) have each key. key(i) is -1 for none. counts [keys]: shared memory that
// nobody uses any more. A barrier before the first key is asked for, and at the end.
template <int kAhead, class Key>
__device__ void count_keys(int64_t begin, int64_t end, int keys, Key&& key, int32_t* counts) {
  for (int k = threadIdx.x; k < keys; k += blockDim.x) counts[k] = 0;
  __syncthreads();
  for (int64_t i = begin + threadIdx.x; i < end; i += int64_t(kAhead) * blockDim.x) {
    int k[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int64_t at = i + int64_t(a) * blockDim.x;
      k[a] = key(at < end ? at : end - 1);
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a)
      if (i + int64_t(a) * blockDim.x >= end) k[a] = -1;
#pragma unroll
    for (int a = 0; a < kAhead; ++a)
      if (k[a] >= 0) atomicAdd(&counts[k[a]], 1);
  }
  __syncthreads();
}

// This block's row of chunk_counts [chunks, keys].
template <int kAhead, class Key>
__device__ void count_chunk(const Chunks& chunks, int keys, Key&& key, int32_t* counts,
                            int32_t* chunk_counts) {
  count_keys<kAhead>(chunks.begin(blockIdx.x), chunks.end(blockIdx.x), keys, key, counts);
  for (int k = threadIdx.x; k < keys; k += blockDim.x)
    chunk_counts[int64_t(blockIdx.x) * keys + k] = counts[k];
}

// finish(k, sum) of each key's column of counts [rows, stride], which a kernel before has left. kPieces lanes
// take a key, every kPieces-th row each, so that a warp reads whole sectors; one of them finishes it.
template <class Finish>
__device__ void add_up_rows(const int32_t* counts, int64_t stride, int rows, int keys, Finish&& finish) {
  constexpr int kPieces = 4, kAhead = 8;
  const int piece = threadIdx.x % kPieces;
  for (int first = 0; first < keys; first += blockDim.x / kPieces) {
    const int k = first + threadIdx.x / kPieces;
    int32_t sum = 0;
    for (int row = piece; k < keys && row < rows; row += kAhead * kPieces) {
      int32_t here[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int at = row + a * kPieces < rows ? row + a * kPieces : row;
        here[a] = counts[at * stride + k];
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) sum += row + a * kPieces < rows ? here[a] : 0;
    }
    for (int far = 1; far < kPieces && far < rows; far *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, far);
    if (k < keys && piece == 0) finish(k, sum);
  }
}

// before [keys], for rank_keys: what the chunks before this one have, of the rows that count_chunk has left.
__device__ inline void add_up_chunks(const int32_t* chunk_counts, int keys, int32_t* before) {
  add_up_rows(chunk_counts, keys, blockIdx.x, keys, [&](int k, int32_t sum) { before[k] = sum; });
}

// next [warps, keys], how often each warp's part has a key, becomes how many come before the part.
template <class Before>
__device__ void add_up_warps(int warps, int keys, Before&& before, int32_t* next) {
  constexpr int kAhead = 4;  // shared loads before the first store, behind which none is moved up
  for (int k = threadIdx.x; k < keys; k += blockDim.x) {
    int32_t sum = before(k);
    for (int first = 0; first < warps; first += kAhead) {
      int32_t here[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) here[a] = first + a < warps ? next[(first + a) * keys + k] : 0;
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (first + a < warps) next[(first + a) * keys + k] = sum;
        sum += here[a];
      }
    }
  }
}

// use(i, k, rank) for every item of this block's chunk; k = key(i), rank of no meaning if that is -1.
// before(k): items with key k in the chunks before. next [warps, keys]: shared memory.
// A warp goes through its own contiguous part in order, 32 items at a time.
template <class Key, class Before, class Use>
__device__ void rank_keys(const Chunks& chunks, int keys, Key&& key, Before&& before, int32_t* next,
                          Use&& use) {
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  const unsigned all = 0xffffffffu, before_me = (1u << lane) - 1;
  const int64_t part = chunks.size / warps, end = chunks.end(blockIdx.x);
  const int64_t first = chunks.begin(blockIdx.x) + threadIdx.x / 32 * part;
  const int64_t last = first + part < end ? first + part : end;
  int32_t* const mine = next + threadIdx.x / 32 * keys;

  // rank of an item among those of this warp's turn, added to what the counter holds; then the counter moves.
  auto turn = [&](int64_t i) {
    const int k = i < last ? key(i) : -1;
    const unsigned peers = __match_any_sync(all, k);
    const int rank = k >= 0 ? mine[k] + __popc(peers & before_me) : 0;
    __syncwarp();  // all have read
    if (k >= 0 && (peers & before_me) == 0) mine[k] += __popc(peers);
    __syncwarp();
    if (i < last) use(i, k, rank);
  };

  for (int k = threadIdx.x; k < warps * keys; k += blockDim.x) next[k] = 0;
  __syncthreads();
  for (int64_t i = first; i < last; i += 32) {
    const int k = i + lane < last ? key(i + lane) : -1;
    const unsigned peers = __match_any_sync(all, k);
    if (k >= 0 && (peers & before_me) == 0) mine[k] += __popc(peers);
    __syncwarp();
  }
  __syncthreads();
  add_up_warps(warps, keys, before, next);
  __syncthreads();
  for (int64_t i = first; i < last; i += 32) turn(i + lane);
}

}  // namespace isoload::cuda
