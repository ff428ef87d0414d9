// route_columns: the look-up of route_numbered, and the matching of route_shared behind it.
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

// What a block leaves, in two words, once its part is done. Nobody sets this memory to 0 before: that would
// be one more kernel. An earlier batch has taken its words back; of other memory, at random, one batch in
// 2^59 has these 64 bits in a block's place.
__device__ int32_t done_word(int i) { return i % 2 == 0 ? 0x5d1c9e37 : 0x2e8fb64b; }

// In global memory, written and read by blocks at the same time: by atomics only.
struct Meeting {
  int32_t* done;    // [blocks, 2]
  int32_t* visits;  // [T, 2] which ranks a token visits, 32 a word

  static constexpr int kMostBlocks = FewMatcher::kMostTokens / cpu::kPartRows;
  static_assert(kMostBlocks <= 32, "a lane per block");
  static int64_t bytes(int64_t T) { return (kMostBlocks + T) * 2 * int64_t(sizeof(int32_t)); }
  __device__ static Meeting at(void* global) {
    auto* const words = static_cast<int32_t*>(global);
    return {words, words + 2 * kMostBlocks};
  }

  // Whether all blocks' visits are there. Fences of a GPU have one order, so the block whose fences come last
  // sees all words; another that sees them too does the same once more.
  __device__ bool all_are_done() const {
    __syncthreads();  // this block's visits are written
    if (threadIdx.x == 0) {
      __threadfence();
      for (int i = 0; i < 2; ++i) atomicExch(&done[2 * blockIdx.x + i], done_word(i));
    }
    __syncthreads();  // and its word
    bool missing = false;
    if (threadIdx.x < gridDim.x) {
      __threadfence();
      for (int i = 0; i < 2; ++i) missing |= atomicOr(&done[2 * threadIdx.x + i], 0) != done_word(i);
      __threadfence();
    }
    return !__syncthreads_or(missing);
  }
  __device__ void take_back() const {
    if (threadIdx.x < 2 * gridDim.x) atomicExch(&done[threadIdx.x], 0);
  }
};

// In shared memory, the lists behind it.
struct Columns {
  FewMatcher::Shared matcher;
  int32_t visits[2 * cpu::kPartRows];  // of the part's tokens
};

template <int kTurns, class Id>
__global__ void __launch_bounds__(LookUpTeam::kLanes, 1)
    route_columns_kernel(Numbers<Id> in, SharedRoute shared, void* global) {
  take_turn();
  __shared__ LookUpTeam::Group group;
  LookUpTeam team(group);
  auto& columns = *reinterpret_cast<Columns*>(shared_memory);
  const Meeting meeting = Meeting::at(global);
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
    if (!meeting.all_are_done()) return;
    meeting.take_back();
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

}  // namespace

int64_t route_columns_bytes(const SharedRoute& shared) {
  if (shared.source_quota == nullptr) return 0;
  return FewMatcher::fits(shared) ? Meeting::bytes(shared.T) : route_shared_bytes(shared);
}

template <class Id>
const char* route_columns(const Id* ids, int E, const ReplicaTables& tables, const Numbered& numbered,
                          const SharedRoute& shared, const int32_t* source_quota, Id* slots, void* global,
                          void* stream) {
  const int P = shared.R * shared.S;
  const bool dealt = shared.source_quota != nullptr;
  if (dealt && FewMatcher::fits(shared) && shared_bytes(E, P) <= shared_limit()) {
    const Numbers<Id> in = numbers_of(ids, shared.T, shared.K, E, P, tables, numbered,
                                      cpu::columns_of(shared), source_quota, slots);
    auto* const kernel =
        in.part <= LookUpTeam::kLanes ? route_columns_kernel<1, Id> : route_columns_kernel<kMostTurns, Id>;
    return launch(kernel, cpu::num_parts(shared.T), LookUpTeam::kLanes, shared_bytes(E, P), stream, in,
                  shared, global);
  }
  const char* const error = route_numbered(ids, shared.T, shared.K, E, P, tables, numbered,
                                           cpu::columns_of(shared), source_quota, slots, stream);
  return error || !dealt ? error : route_shared(shared, slots, slots + shared.K, global, stream);
}

template const char* route_columns(const int32_t*, int, const ReplicaTables&, const Numbered&,
                                   const SharedRoute&, const int32_t*, int32_t*, void*, void*);
template const char* route_columns(const int64_t*, int, const ReplicaTables&, const Numbered&,
                                   const SharedRoute&, const int32_t*, int64_t*, void*, void*);

}  // namespace isoload::cuda
