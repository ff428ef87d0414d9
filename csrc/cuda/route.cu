// route: a look-up per copy, a block per part of the tokens, and the matching of route_shared behind it.
//
// Tokens are matched once all their routed copies have slots. Of as many as FewMatcher takes that is one
// kernel: blocks look up their parts and leave which ranks tokens visit, and the last to do so matches. No
// block waits for another. More tokens or ranks take two kernels.
#include "algorithms/quotient.h"
#include "cuda/cuda.h"
#include "cuda/launch.cuh"
#include "cuda/look_up.cuh"
#include "cuda/match_few.cuh"

namespace isoload::cuda {
namespace {

template <int kTurns, bool kShared, class Id>
__global__ void __launch_bounds__(LookUpTeam::kLanes, 1) route_numbered_kernel(Numbers<Id> in) {
  take_turn();
  __shared__ LookUpTeam::Group group;
  LookUpTeam team(group);
  look_up_part<kTurns, kShared>(team, in, reinterpret_cast<int32_t*>(shared_memory), [](int64_t, int) {});
}

// In global memory, written and read by blocks at the same time: by atomics only.
//
// Blocks count themselves in the upper bits of a word in which they are 0: the last part's copies of expert
// 0, as count has set it for this batch. A look-up reads the parts before its own
// alone, so nobody else needs the word now, and the last block leaves it as it was. Two calls at a time, on
// two streams, need numbers of their own.
struct Meeting {
  static constexpr int kOne = 1 << 25;  // above what the copies of a part are counted to

  int32_t* word;
  int32_t* visits;  // [T, 2] which ranks a token visits, 32 a word

  static constexpr int kMostBlocks = FewMatcher::kMostTokens / cpu::kPartRows;
  static_assert(kMostBlocks < INT32_MAX / kOne, "a word counts all blocks");
  static int64_t bytes(int64_t T) { return T * 2 * int64_t(sizeof(int32_t)); }

  // Whether this block is the last to come, so that all visits are there.
  __device__ bool is_last() const {
    __syncthreads();  // this block's visits are written
    bool last = false;
    if (threadIdx.x == 0) {
      __threadfence();
      const int blocks = gridDim.x;
      last = atomicAdd(word, kOne) / kOne == blocks - 1;
      if (last) atomicAdd(word, -blocks * kOne);
      __threadfence();
    }
    return __syncthreads_or(last);
  }
};

// In shared memory, the lists behind it.
struct Columns {
  FewMatcher::Shared matcher;
  int32_t visits[2 * cpu::kPartRows];  // of the part's tokens
};

template <int kTurns, class Id>
__global__ void __launch_bounds__(LookUpTeam::kLanes, 1)
    route_columns_kernel(Numbers<Id> in, SharedRoute shared, int32_t* visits) {
  take_turn();
  __shared__ LookUpTeam::Group group;
  LookUpTeam team(group);
  auto& columns = *reinterpret_cast<Columns*>(shared_memory);
  const int32_t* const last_part = in.numbered.parts + (gridDim.x - 1) * in.numbered.stride;
  const Meeting meeting{const_cast<int32_t*>(last_part), visits};
  const Divisor slots_per_rank(shared.S), width(in.width);
  const int first = blockIdx.x * static_cast<int>(cpu::kPartRows);
  team.for_each(2 * cpu::kPartRows, [&](int i) { columns.visits[i] = 0; });
  look_up_part<kTurns, true>(team, in, reinterpret_cast<int32_t*>(&columns + 1), [&](int64_t i, int slot) {
    const int token = width.quotient(static_cast<int>(i)) - first, rank = slots_per_rank.quotient(slot);
    atomicOr(&columns.visits[2 * token + rank / 32], static_cast<int32_t>(1u << rank % 32));
  });
  team.sync();
  const bool alone = gridDim.x == 1;
  if (!alone) {
    team.for_each(2 * cpu::kPartRows, [&](int i) {
      if (first + i / 2 < shared.T) atomicExch(&meeting.visits[2 * first + i], columns.visits[i]);
    });
    if (!meeting.is_last()) return;
  }
  FewMatcher matcher(columns.matcher, shared);
  matcher.read([&](int t) {
    auto word = [&](int i) -> uint32_t {
      return alone ? columns.visits[i] : atomicOr(&meeting.visits[i], 0);
    };
    return uint64_t(word(2 * t + 1)) << 32 | word(2 * t);
  });
  for (int j = 0; j < shared.num_shared; ++j) matcher.match(j, in.slots + in.K);
}

int64_t shared_bytes(int E, int P) { return sizeof(Columns) + Lists::bytes(E, P); }

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
  return FewMatcher::fits(in.shared) ? Meeting::bytes(in.T) : route_shared_bytes(in.shared);
}

template <class Id>
const char* route(const Route& in, const Id* ids, Id* slots, void* global, void* stream) {
  const Numbers<Id> numbers = numbers_of(in, ids, slots);
  const bool dealt = in.shared.source_quota != nullptr;
  if (dealt && FewMatcher::fits(in.shared) && numbers.part < Meeting::kOne &&
      shared_bytes(in.E, in.P) <= shared_limit()) {
    auto* const kernel = numbers.part <= LookUpTeam::kLanes ? route_columns_kernel<1, Id>
                                                            : route_columns_kernel<kMostTurns, Id>;
    return launch(kernel, cpu::num_parts(in.T), LookUpTeam::kLanes, shared_bytes(in.E, in.P), stream, numbers,
                  in.shared, static_cast<int32_t*>(global));
  }
  const char* const error = look_up_all(in, numbers, stream);
  return error || !dealt ? error : route_shared(in.shared, slots, slots + in.K, global, stream);
}

template const char* route(const Route&, const int32_t*, int32_t*, void*, void*);
template const char* route(const Route&, const int64_t*, int64_t*, void*, void*);

}  // namespace isoload::cuda
