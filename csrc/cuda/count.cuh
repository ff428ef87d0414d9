// The ids of a count, and a group of experts counted by a block that reads all of them.
#pragma once

#include "algorithms/quotient.h"
#include "cuda/cuda.h"
#include "cuda/stable_rank.cuh"

namespace isoload::cuda {

constexpr int kAhead = 8;                                // loads of a lane on their way at once
constexpr int kAloneThreads = 1024, kAloneExperts = 32;  // a block's group of experts, its shared atomics
constexpr int kMostAlone = 32;                           // blocks that read all ids
constexpr int64_t kMostAloneIds = kAloneThreads * kAhead;

template <class Id>
__device__ int32_t fault(Id id, int E) {
  return expert_of(id, E) >= 0 || id == -1 ? 0 : kCountId;
}

// The ids [T, K] of routed experts and, behind each row, those of the shared ones: E, and so a fault, for a
// routed choice of these.
template <class Id>
struct WithShared {
  const Id* ids;
  int K, num_routed, E;
  Divisor width;

  __device__ Id at(int i) const {
    const int row = width.quotient(i), column = i - row * static_cast<int>(width.d);
    const Id* const choices = ids + int64_t(row) * K;
    if (column < K) {
      const Id choice = choices[column];
      return choice < num_routed ? choice : Id(E);
    }
    int k = 0;
#pragma unroll 1
    while (k < K && choices[k] < 0) ++k;
    return k < K ? Id(num_routed + column - K) : Id(-1);
  }
};

// fetch_ahead of the ids from the i-th on.
template <int kStep, int kAhead, class Id>
__device__ void fetch_ids(const Id* ids, int64_t i, int left, Id (&fetched)[kAhead]) {
  fetch_ahead<kStep>(ids + i, left, fetched);
}
template <int kStep, int kAhead, class Id>
__device__ void fetch_ids(const WithShared<Id>& ids, int64_t i, int left, Id (&fetched)[kAhead]) {
#pragma unroll
  for (int a = 0; a < kAhead; ++a)
    fetched[a] = a * kStep < left ? ids.at(static_cast<int>(i) + a * kStep) : Id(-1);
}

// use(id) of this block's share of the ids [n], and of -1: `blocks` blocks of kLanes take turns.
template <int kLanes, class Id, class Ids, class Use>
__device__ void for_ids(const Ids& ids, int64_t n, int64_t block, int64_t blocks, Use&& use) {
  constexpr int64_t kTile = kLanes * kAhead;
  for (int64_t i = block * kTile + threadIdx.x; i < n; i += blocks * kTile) {
    Id id[kAhead];
    fetch_ids<kLanes>(ids, i, static_cast<int>(n - i), id);
#pragma unroll
    for (int a = 0; a < kAhead; ++a) use(id[a]);
  }
}

// counts of the group-th kAloneExperts experts, by a block of kAloneThreads that reads all ids.
template <class Id, class Ids>
__device__ int32_t count_group(const Ids& ids, int64_t n, int E, int group, int32_t* counts) {
  __shared__ int32_t mine[kAloneExperts];
  const int first = group * kAloneExperts;
  const int here = E - first < kAloneExperts ? E - first : kAloneExperts;
  if (threadIdx.x < kAloneExperts) mine[threadIdx.x] = 0;
  __syncthreads();
  int32_t faults = 0;
  for_ids<kAloneThreads, Id>(ids, n, 0, 1, [&](Id id) {
    faults |= fault(id, E);
    if (id >= first && id < first + here) atomicAdd(&mine[id - first], 1);
  });
  __syncthreads();
  if (threadIdx.x < here) counts[first + threadIdx.x] = mine[threadIdx.x];
  return faults;
}

// Of so few ids and experts every block counts a group.
inline bool few(int64_t n, int E) { return n <= kMostAloneIds && E <= kMostAlone * kAloneExperts; }
inline int num_groups(int E) { return (E + kAloneExperts - 1) / kAloneExperts; }

inline const char* clear(int32_t* counts, int E, void* stream) {
  return refused(cudaMemsetAsync(counts, 0, E * sizeof(int32_t), static_cast<cudaStream_t>(stream)));
}

}  // namespace isoload::cuda
