// route with prefer_visited: ask, grant, deal. A copy with a choice first asks for a replica on a rank that
// its token visits anyway; the others are dealt from what the share still holds then, the i-th copy of an
// expert to the first replica whose cumulative share exceeds i.
#pragma once

#include "cuda/cuda.h"
#include "cuda/stable_rank.cuh"

namespace isoload::cuda {

constexpr int kVisitThreads = kRankWarps * 32;
constexpr int kVisitAhead = 8;
constexpr int kUnset = -2;

template <class Id>
struct Copies {
  Chunks chunks;
  const Id* ids;  // [n]
  Id* slots;      // [n]
  int K, E, P;
  ReplicaTables t;
  const int32_t* share;  // [P]
  int32_t* errors;       // the device's error word

  __device__ int expert(int64_t i) const { return expert_of(ids[i], E); }
  __device__ int unset_expert(int64_t i) const { return slots[i] == kUnset ? expert(i) : -1; }

  // Sets the slot of e's copy number `rank`; -1 if e is none or its share is used up.
  __device__ void set(int64_t i, int e, int32_t rank, const int32_t* left) const {
    const int slot = e < 0 ? -1 : deal(e, rank, left);
    slots[i] = static_cast<Id>(slot);
    if (slot < 0 && ids[i] != -1) report(errors, e < 0 ? kRouteId : kRouteShare);
  }

 private:
  // The slot of e's copy number `rank`; -1: the share is used up.
  __device__ int deal(int e, int32_t rank, const int32_t* left) const {
    for (int j = t.offsets[e]; j < t.offsets[e + 1]; ++j) {
      const int32_t here = left[t.slots[j]];
      if (here > rank) return t.slots[j];
      rank -= here > 0 ? here : 0;
    }
    return -1;
  }
};

// Of kUnset slots; left [P]: what the share still holds.
template <class Id>
__global__ void __launch_bounds__(kMostWarps * 32, 1)
    route_deal_kernel(Copies<Id> in, const int32_t* expert_counts, const int32_t* left) {
  take_turn();
  auto* const before = reinterpret_cast<int32_t*>(shared_memory);  // [E]
  add_up_chunks(expert_counts, in.E, before);
  rank_keys(
      in.chunks, in.E, [&](int64_t i) { return in.unset_expert(i); }, [&](int e) { return before[e]; },
      before + in.E,
      [&](int64_t i, int e, int32_t rank) {
        if (in.slots[i] == kUnset) in.set(i, e, rank, left);
      });
}

// slots: the slot that a copy asks for, or kUnset. slot_counts [chunks, P]: askers per slot.
template <class Id>
__global__ void __launch_bounds__(kVisitThreads) route_ask_kernel(Copies<Id> in, int32_t* slot_counts) {
  take_turn();
  auto* const forced = reinterpret_cast<int32_t*>(shared_memory);  // [E]
  const ReplicaTables& t = in.t;
  for (int e = threadIdx.x; e < in.E; e += blockDim.x) {
    int rank = -1;  // of the only replica with a share; -2 if there are several
    for (int j = t.offsets[e]; j < t.offsets[e + 1]; ++j)
      if (in.share[t.slots[j]] > 0) rank = rank == -1 ? t.ranks[j] : -2;
    forced[e] = rank;
  }
  auto visits = [&](int64_t token, int rank) {
    bool found = false;
    for (int k = 0; k < in.K; ++k) {
      const int e = in.expert(token * in.K + k);
      found |= e >= 0 && forced[e] == rank;
    }
    return found;
  };
  auto ask = [&](int64_t i) {
    const int e = in.expert(i);
    const bool choice = e >= 0 && forced[e] == -2;
    int asked = -1;
    for (int j = choice ? t.offsets[e] : 0; choice && j < t.offsets[e + 1] && asked < 0; ++j)
      if (in.share[t.slots[j]] > 0 && visits(i / in.K, t.ranks[j])) asked = t.slots[j];
    in.slots[i] = static_cast<Id>(asked < 0 ? kUnset : asked);
    return asked;
  };
  count_chunk<1>(in.chunks, in.P, ask, forced + in.E, slot_counts);
}

// The first share[p] askers of slot p get it. The last block knows all askers and writes left [P].
template <class Id>
__global__ void __launch_bounds__(kMostWarps * 32, 1)
    route_grant_kernel(Copies<Id> in, const int32_t* slot_counts, int32_t* expert_counts, int32_t* left) {
  take_turn();
  auto* const before = reinterpret_cast<int32_t*>(shared_memory);  // [P]
  int32_t* const next = before + in.P;
  add_up_chunks(slot_counts, in.P, before);
  rank_keys(
      in.chunks, in.P, [&](int64_t i) { return static_cast<int>(in.slots[i]); },
      [&](int p) { return before[p]; }, next,
      [&](int64_t i, int p, int32_t rank) {
        if (p >= 0 && rank >= in.share[p]) in.slots[i] = kUnset;
      });
  if (blockIdx.x == gridDim.x - 1) {
    const int32_t* const asked = next + (blockDim.x / 32 - 1) * in.P;
    for (int p = threadIdx.x; p < in.P; p += blockDim.x)
      left[p] = in.share[p] - (asked[p] < in.share[p] ? asked[p] : in.share[p]);
  }
  count_chunk<kVisitAhead>(
      in.chunks, in.E, [&](int64_t i) { return in.unset_expert(i); }, next, expert_counts);
}

// Counts per chunk and expert, per chunk and slot, and what the share still holds.
inline int64_t route_visited_bytes(const Route& in) {
  const int64_t chunks = Chunks::of(in.T * in.K).count();
  return (chunks * (in.E + in.P) + in.P) * int64_t(sizeof(int32_t));
}

template <class Id>
const char* route_visited(const Route& in, const Id* ids, Id* slots, void* global, void* stream) {
  const Copies<Id> copies{Chunks::of(in.T * in.K), ids,         slots, in.K, in.E, in.P, in.tables,
                          in.send_counts,          error_word()};
  const int64_t blocks = copies.chunks.count(), word = sizeof(int32_t), keys = in.P > in.E ? in.P : in.E;
  const int warps = rank_warps(keys, kMostWarps, 1);
  if (warps == 0) return "more experts or slots than a block can count";
  const int64_t bytes = (warps + 1) * keys * word, ask_bytes = (in.E + int64_t(in.P)) * word;
  auto* const expert_counts = static_cast<int32_t*>(global);
  int32_t *const slot_counts = expert_counts + blocks * in.E, *const left = slot_counts + blocks * in.P;
  const char* error =
      launch(route_ask_kernel<Id>, blocks, kVisitThreads, ask_bytes, stream, copies, slot_counts);
  if (!error)
    error = launch(route_grant_kernel<Id>, blocks, warps * 32, bytes, stream, copies, slot_counts,
                   expert_counts, left);
  if (!error)
    error = launch(route_deal_kernel<Id>, blocks, warps * 32, bytes, stream, copies, expert_counts, left);
  return error;
}

}  // namespace isoload::cuda
