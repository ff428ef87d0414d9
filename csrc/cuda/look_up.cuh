// look_up: the slots of numbered copies, a look-up each, a block per part of the tokens.
//
// The i-th copy of an expert goes to the first replica whose cumulative share exceeds i. A block has the
// listed replicas' shares added up from the first of all replicas on, modulo 2^32: differences inside one
// expert are what it searches.
#pragma once

#include "cuda/cuda.h"
#include "cuda/fetch.cuh"
#include "cuda/stable_rank.cuh"

namespace isoload::cuda {

using LookUpTeam = BlockTeam<32>;
constexpr int kMostTurns = 2;  // copies of a lane that are looked up side by side

template <class Id>
struct Numbers {
  const Id* ids;  // [n]
  Id* slots;      // [n]
  int64_t n, part;
  int E, P;
  int K, width;  // columns of routed experts, and all
  ReplicaTables t;
  cpu::Numbered numbered;
  const int32_t* share;  // [P]
  int32_t home_slot;     // of the first shared expert; -1: theirs are left to route_shared
  int32_t* errors;       // the device's error word
};

// A shared expert's copy, in column K + j.
template <class Id>
__device__ int32_t route_home(const Numbers<Id>& in, int64_t i, int j, Id id) {
  if (in.home_slot >= 0) in.slots[i] = id == in.E + j ? static_cast<Id>(in.home_slot + j) : Id(-1);
  return id == in.E + j || id == -1 ? 0 : kRouteId;
}

// In shared memory: where each expert's replicas are, which, their shares, and what came in earlier parts.
struct Lists {
  int32_t *offsets, *slots, *share, *upto, *before;  // [E+1], [P], [P], [P+1], [E]

  static int64_t bytes(int64_t E, int64_t P) { return (2 * E + 3 * P + 2) * int64_t(sizeof(int32_t)); }
  __device__ static Lists at(int32_t* data, int E, int P) {
    return {data, data + E + 1, data + E + 1 + P, data + E + 1 + 2 * P, data + E + 2 + 3 * P};
  }
};

// upto [P+1], once the lists have arrived.
__device__ inline void add_up_shares(LookUpTeam& team, int E, int P, const Lists& lists) {
  int32_t sum = 0;
  for (int first = 0; first <= P; first += LookUpTeam::kLanes) {
    const int j = first + team.rank();
    const int slot = j < P ? lists.slots[j] : -1;
    const int32_t share = slot >= 0 ? lists.share[slot] : 0;
    int32_t total;
    const int32_t before = team.before_me(share > 0 ? share : 0, total);
    if (j <= P) lists.upto[j] = sum + before;
    sum += total;
  }
  team.sync();
}

// The slots of this lane's copies at `first` on, a block apart: id and number have been fetched.
template <bool kShared, int kTurns, class Id, class Use>
__device__ int32_t look_up(const Numbers<Id>& in, const Lists& lists, int64_t first, int64_t end,
                           const Id (&id)[kTurns], const int32_t (&number)[kTurns], Use&& use) {
  int low[kTurns], high[kTurns];
  uint32_t from[kTurns], place[kTurns];  // how many copies the expert has before this one
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    const int e = expert_of(id[t], in.E);
    low[t] = e >= 0 ? lists.offsets[e] : 0;
    high[t] = e >= 0 ? lists.offsets[e + 1] : 0;
    place[t] = e >= 0 && number[t] >= 0 ? uint32_t(lists.before[e]) + uint32_t(number[t]) : ~0u;
  }
#pragma unroll
  for (int t = 0; t < kTurns; ++t) from[t] = lists.upto[low[t]];
  int none[kTurns];  // the place behind the last replica
#pragma unroll
  for (int t = 0; t < kTurns; ++t) none[t] = high[t];
  for (bool searching = true; searching;) {
    searching = false;
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      if (low[t] >= high[t]) continue;
      const int middle = (low[t] + high[t]) / 2;
      if (lists.upto[middle + 1] - from[t] > place[t])
        high[t] = middle;
      else
        low[t] = middle + 1;
      searching |= low[t] < high[t];
    }
  }
  int32_t faults = 0;
  int slot[kTurns];
#pragma unroll
  for (int t = 0; t < kTurns; ++t) slot[t] = low[t] < none[t] ? lists.slots[low[t]] : -1;
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    if (first + t * LookUpTeam::kLanes >= end) continue;
    if (kShared) {
      const uint32_t column =
          static_cast<uint32_t>(first + t * LookUpTeam::kLanes) % static_cast<uint32_t>(in.width);
      if (const int j = static_cast<int>(column) - in.K; j >= 0) {
        faults |= route_home(in, first + t * LookUpTeam::kLanes, j, id[t]);
        continue;
      }
    }
    in.slots[first + t * LookUpTeam::kLanes] = static_cast<Id>(slot[t]);
    if (slot[t] >= 0) use(first + t * LookUpTeam::kLanes, slot[t]);
    if (slot[t] < 0 && id[t] != -1) faults |= expert_of(id[t], in.E) < 0 ? kRouteId : kRouteShare;
  }
  return faults;
}

// The routed copies of this block's part; memory: of the lists. use(i, slot): copy i has got this slot.
template <int kTurns, bool kShared, class Id, class Use>
__device__ void look_up_part(LookUpTeam& team, const Numbers<Id>& in, int32_t* memory, Use&& use) {
  const Lists lists = Lists::at(memory, in.E, in.P);
  const int64_t begin = blockIdx.x * in.part + team.rank();
  const int64_t end = (blockIdx.x + 1) * in.part < in.n ? (blockIdx.x + 1) * in.part : in.n;
  Id id[kTurns];
  int32_t number[kTurns], faults = 0;
  auto look_ahead = [&](int64_t i) {
    fetch_ahead<LookUpTeam::kLanes>(in.ids + i, static_cast<int>(end - i), id);
    fetch_ahead<LookUpTeam::kLanes>(in.numbered.numbers + i, static_cast<int>(end - i), number);
  };
  fetch(team, in.t.offsets, in.E + 1, lists.offsets);
  fetch(team, in.t.slots, in.P, lists.slots);
  fetch(team, in.share, in.P, lists.share);
  look_ahead(begin);
  add_up_rows(in.numbered.parts, in.numbered.stride, blockIdx.x, in.E,
              [&](int e, int32_t sum) { lists.before[e] = sum; });
  wait_for_fetched(team);
  add_up_shares(team, in.E, in.P, lists);
  for (int64_t i = begin; i < end; i += kTurns * LookUpTeam::kLanes) {
    if (i > begin) look_ahead(i);
    faults |= look_up<kShared>(in, lists, i, end, id, number, use);
  }
  report(in.errors, faults);
}

template <class Id>
Numbers<Id> numbers_of(const Route& in, const Id* ids, Id* slots) {
  const int width = in.width();
  return {ids,         slots,       in.T * width,   int64_t(cpu::kPartRows) * width,
          in.E,        in.P,        in.K,           width,
          in.tables,   in.numbered, in.send_counts, in.home_slot(),
          error_word()};
}

}  // namespace isoload::cuda
