// group_copies: a stable counting sort of the copies by slot. One block sorts what is one chunk; of more
// chunks, one kernel counts each of them before a second places their copies.
#include "cuda/cuda.h"
#include "cuda/stable_rank.cuh"

namespace isoload::cuda {
namespace {

constexpr int kThreads = kRankWarps * 32;
constexpr int kAhead = 8;

template <class Slot>
struct Sorting {
  Chunks chunks;
  const Slot* slots;  // [n]
  cpu::CopyGroup of;
  cpu::Groups out;
  int32_t* errors;  // the device's error word

  __device__ int slot(int64_t i) const {
    const int64_t local = int64_t(slots[i]) - of.first;
    return local >= 0 && local < of.num_slots ? static_cast<int>(local) : -1;
  }

  // first [S] becomes the place of each slot's first copy, from counts [S] of all copies. By the first warp,
  // which returns how many copies there are to its lanes; barriers around it are the caller's.
  __device__ int64_t add_up(const int32_t* counts, int32_t* first) const {
    const int lane = threadIdx.x % 32, S = of.num_slots;
    int32_t before = 0;
    for (int start = 0; start < S; start += 32) {
      const int s = start + lane;
      const int32_t here = s < S ? counts[s] : 0;
      int32_t up_to = here;
      for (int step = 1; step < 32; step *= 2) {
        const int32_t other = __shfl_up_sync(0xffffffffu, up_to, step);
        if (lane >= step) up_to += other;
      }
      if (s < S) first[s] = before + up_to - here;
      before += __shfl_sync(0xffffffffu, up_to, 31);
    }
    return before;
  }

  // Copies beyond the places there are count as absent. first [S]: shared memory.
  __device__ void place(int64_t i, int s, int32_t rank, const int32_t* first) const {
    const int64_t at = s < 0 ? of.num_places : int64_t(first[s]) + rank;
    out.position[i] = at < of.num_places ? at : of.num_places;
    if (at >= of.num_places) return;
    out.copy[at] = i;
    out.slot[at] = s;
  }

  // The ends, and the tail behind all `present` copies: this block's part of both.
  __device__ void finish(const int32_t* first, const int32_t* counts, int64_t present) const {
    const int64_t C = of.num_places;
    if (blockIdx.x == 0) {
      for (int s = threadIdx.x; s < of.num_slots; s += blockDim.x) {
        const int64_t end = int64_t(first[s]) + counts[s];
        out.ends[s] = static_cast<int32_t>(end < C ? end : C);
      }
      if (threadIdx.x == 0 && present > C) report(errors, kGroupPlaces);
    }
    for (int64_t c = present + int64_t(blockIdx.x) * blockDim.x + threadIdx.x; c < C;
         c += int64_t(gridDim.x) * blockDim.x) {
      out.copy[c] = 0;
      out.slot[c] = of.num_slots > 0 ? of.num_slots - 1 : 0;
    }
  }
};

// What both kernels do once counts [S] of all copies are in shared memory: first [S] and next [warps, S] too.
template <class Slot, class Before>
__device__ void sort(const Sorting<Slot>& in, const int32_t* counts, int32_t* first, int32_t* next,
                     Before&& before) {
  __shared__ int64_t present;
  if (threadIdx.x < 32) {
    const int64_t all = in.add_up(counts, first);
    if (threadIdx.x == 0) present = all;
  }
  __syncthreads();
  in.finish(first, counts, present);
  rank_keys(
      in.chunks, in.of.num_slots, [&](int64_t i) { return in.slot(i); }, before, next,
      [&](int64_t i, int s, int32_t rank) { in.place(i, s, rank, first); });
}

// Of one chunk.
template <class Slot>
__global__ void __launch_bounds__(kMostWarps * 32, 1) group_alone_kernel(Sorting<Slot> in) {
  take_turn();
  const int S = in.of.num_slots;
  auto* const counts = reinterpret_cast<int32_t*>(shared_memory);  // [S]
  int32_t *const first = counts + S, *const next = first + S;
  count_keys<1>(0, in.chunks.n, S, [&](int64_t i) { return in.slot(i); }, counts);
  sort(in, counts, first, next, [](int) { return 0; });
}

template <class Slot>
__global__ void __launch_bounds__(kThreads) group_count_kernel(Sorting<Slot> in, int32_t* chunk_counts) {
  take_turn();
  auto* const counts = reinterpret_cast<int32_t*>(shared_memory);
  count_chunk<kAhead>(
      in.chunks, in.of.num_slots, [&](int64_t i) { return in.slot(i); }, counts, chunk_counts);
}

template <class Slot>
__global__ void __launch_bounds__(kMostWarps * 32, 1)
    group_place_kernel(Sorting<Slot> in, const int32_t* chunk_counts) {
  take_turn();
  const int S = in.of.num_slots;
  auto* const before = reinterpret_cast<int32_t*>(shared_memory);  // [S] in the blocks before this one
  int32_t *const counts = before + S, *const first = counts + S, *const next = first + S;
  const int rows = blockIdx.x;
  add_up_chunks(chunk_counts, S, before);
  add_up_rows(chunk_counts + int64_t(rows) * S, S, gridDim.x - rows, S,
              [&](int s, int32_t sum) { counts[s] = before[s] + sum; });  // the lane that has set before[s]
  __syncthreads();
  sort(in, counts, first, next, [&](int s) { return before[s]; });
}

}  // namespace

int64_t group_copies_bytes(const cpu::CopyGroup& of) {
  const int64_t chunks = Chunks::of(of.n).count();
  return chunks <= 1 ? 0 : chunks * of.num_slots * int64_t(sizeof(int32_t));
}

template <class Slot>
const char* group_copies(const Slot* slots, const cpu::CopyGroup& of, const cpu::Groups& out, void* global,
                         void* stream) {
  const Sorting<Slot> in{Chunks::of(of.n), slots, of, out, error_word()};
  const int64_t chunks = in.chunks.count(), row = of.num_slots * int64_t(sizeof(int32_t));
  const int warps = rank_warps(of.num_slots, kMostWarps, 3);
  if (warps == 0) return "group_copies: num_slots do not fit into shared memory";
  if (chunks <= 1)  // of no copies the ends are written, too
    return launch(group_alone_kernel<Slot>, 1, warps * 32, (warps + 2) * row, stream, in);
  auto* const chunk_counts = static_cast<int32_t*>(global);
  const char* const error = launch(group_count_kernel<Slot>, chunks, kThreads, row, stream, in, chunk_counts);
  if (error != nullptr) return error;
  return launch(group_place_kernel<Slot>, chunks, warps * 32, (warps + 3) * row, stream, in,
                static_cast<const int32_t*>(chunk_counts));
}

template const char* group_copies(const int32_t*, const cpu::CopyGroup&, const cpu::Groups&, void*, void*);
template const char* group_copies(const int64_t*, const cpu::CopyGroup&, const cpu::Groups&, void*, void*);

}  // namespace isoload::cuda
