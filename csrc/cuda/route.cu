// route: a look-up per copy, a block per part of the tokens, and the matching of route_shared behind it.
//
// Tokens are matched once all their routed copies have slots. Of as many as one block keeps that is one
// kernel: blocks look up their parts and leave which ranks tokens visit, and the last to do so matches. No
// block waits for another. What is too much for it takes two kernels or three.
#include <algorithm>

#include "algorithms/quotient.h"
#include "cuda/cuda.h"
#include "cuda/launch.cuh"
#include "cuda/look_up.cuh"
#include "cuda/matchers.cuh"

namespace isoload::cuda {
namespace {

template <int kTurns, bool kShared, class Id>
__global__ void __launch_bounds__(LookUpTeam::kLanes, 1) route_numbered_kernel(Numbers<Id> in) {
  take_turn();
  __shared__ LookUpTeam::Group group;
  LookUpTeam team(group);
  look_up_part<kTurns, kShared>(team, in, reinterpret_cast<int32_t*>(shared_memory), [](int64_t, int) {});
}

constexpr int kMeeting = 1 << 22;  // what a block counts as: above what the copies of a part are counted to

// In global memory, written and read by blocks at the same time: by atomics only.
//
// Blocks count themselves in the upper bits of a word in which they are 0: the last part's copies of expert
// 0, as count has set it for this batch. A look-up reads the parts before its own
// alone, so nobody else needs the word now, and the last block leaves it as it was. Two calls at a time, on
// two streams, need numbers of their own.
template <class Matcher>
struct Meeting {
  int32_t* word;
  typename Matcher::Visits visits;

  static constexpr int kMostBlocks = Matcher::kMostTokens / cpu::kPartRows;
  static_assert(kMostBlocks < INT32_MAX / kMeeting, "a word counts all blocks");

  // Whether this block is the last to come, so that all visits are there.
  __device__ bool is_last() const {
    __syncthreads();  // this block's visits are written
    bool last = false;
    if (threadIdx.x == 0) {
      __threadfence();
      const int blocks = gridDim.x;
      last = atomicAdd(word, kMeeting) / kMeeting == blocks - 1;
      if (last) atomicAdd(word, -blocks * kMeeting);
      __threadfence();
    }
    return __syncthreads_or(last);
  }

  // All of them to shared memory, many at a time.
  __device__ void take_visits(LookUpTeam& team, int R, int32_t* to) const {
    constexpr int kAhead = 8;
    const int n = visits.size(R, visits.words);
    for (int i = team.rank(); i < n; i += kAhead * LookUpTeam::kLanes) {
      int32_t word[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int at = i + a * LookUpTeam::kLanes;
        word[a] = at < n ? atomicOr(&visits.data[at], 0) : 0;
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a)
        if (i + a * LookUpTeam::kLanes < n) to[i + a * LookUpTeam::kLanes] = word[a];
    }
    team.sync();
  }
};

// In shared memory. Behind it: the lists, then, in the block that matches, all visits.
template <class Matcher>
struct Columns {
  typename Matcher::Shared matcher;
  alignas(16) int32_t visits[64 * kPartWords];  // of the part's tokens

  static int64_t bytes(const Route& in) {
    return sizeof(Columns) + std::max(Lists::bytes(in.E, in.P), visits_bytes<Matcher>(in.shared));
  }
};

template <bool kBits, int kTurns, class Id>
__global__ void __launch_bounds__(LookUpTeam::kLanes, 1)
    route_columns_kernel(Numbers<Id> in, SharedRoute shared, int32_t* visits) {
  take_turn();
  __shared__ LookUpTeam::Group group;
  LookUpTeam team(group);
  using Matcher = MatcherOf<kBits>;
  using Visits = typename Matcher::Visits;
  auto& columns = *reinterpret_cast<Columns<Matcher>*>(shared_memory);
  const int32_t* const last_part = in.numbered.parts + (gridDim.x - 1) * in.numbered.stride;
  const Meeting<Matcher> meeting{const_cast<int32_t*>(last_part), {visits, words_of(shared.T)}};
  const Divisor slots_per_rank(shared.S), width(in.width);
  const int first = blockIdx.x * static_cast<int>(cpu::kPartRows);
  const Visits part{columns.visits, kPartWords};
  team.for_each(part.size(shared.R, part.words), [&](int i) { part.data[i] = 0; });
  auto* const behind = reinterpret_cast<int32_t*>(&columns + 1);
  look_up_part<kTurns, true>(team, in, behind, [&](int64_t i, int slot) {
    part.add(slots_per_rank.quotient(slot), width.quotient(static_cast<int>(i)) - first);
  });
  team.sync();
  const bool alone = gridDim.x == 1;
  if (!alone) {
    team.for_each(part.size(shared.R, part.words), [&](int i) {
      atomicExch(&meeting.visits.data[meeting.visits.of_part(blockIdx.x, i)], part.data[i]);
    });
    if (!meeting.is_last()) return;
    meeting.take_visits(team, shared.R, behind);
  }
  Matcher matcher(columns.matcher, shared, alone ? part : Visits{behind, meeting.visits.words});
  for (int j = 0; j < shared.num_shared; ++j) matcher.match(j, in.slots + in.K);
}

template <class Id>
const char* look_up_all(const Route& in, const Numbers<Id>& numbers, void* stream) {
  const int64_t bytes = Lists::bytes(in.E, in.P);
  if (bytes > shared_limit()) return "more experts or slots than a block can list";
  const bool once = numbers.part <= LookUpTeam::kLanes;
  auto* const kernel = in.shared.num_shared == 0 ? once ? route_numbered_kernel<1, false, Id>
                                                        : route_numbered_kernel<kMostTurns, false, Id>
                       : once                    ? route_numbered_kernel<1, true, Id>
                                                 : route_numbered_kernel<kMostTurns, true, Id>;
  return launch(kernel, numbers.n > 0 ? cpu::num_parts(in.T) : 0, LookUpTeam::kLanes, bytes, stream, numbers);
}

}  // namespace

int64_t route_bytes(const Route& in) {
  if (in.shared.source_quota == nullptr) return 0;
  return with_matcher(
      in.shared, [&](auto bits) { return visits_bytes<MatcherOf<bits.value>>(in.shared); },
      [&] { return route_shared_bytes(in.shared); });
}

template <class Id>
const char* route(const Route& in, const Id* ids, Id* slots, void* global, void* stream) {
  const Numbers<Id> numbers = numbers_of(in, ids, slots);
  const bool dealt = in.shared.source_quota != nullptr;
  auto apart = [&] {
    const char* const error = look_up_all(in, numbers, stream);
    return error || !dealt ? error : route_shared(in.shared, slots, slots + in.K, global, stream);
  };
  if (!dealt || numbers.part >= kMeeting) return apart();
  auto together = [&](auto bits) {
    using Matcher = MatcherOf<bits.value>;
    const int64_t bytes = Columns<Matcher>::bytes(in);
    if (bytes > shared_limit()) return apart();
    auto* const kernel = numbers.part <= LookUpTeam::kLanes
                             ? route_columns_kernel<bits.value, 1, Id>
                             : route_columns_kernel<bits.value, kMostTurns, Id>;
    return launch(kernel, cpu::num_parts(in.T), LookUpTeam::kLanes, bytes, stream, numbers, in.shared,
                  static_cast<int32_t*>(global));
  };
  return with_matcher(in.shared, together, apart);
}

template const char* route(const Route&, const int32_t*, int32_t*, void*, void*);
template const char* route(const Route&, const int64_t*, int64_t*, void*, void*);

}  // namespace isoload::cuda
