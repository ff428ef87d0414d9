// number_rows: a token's row to a rank is numbered among those of earlier tokens to it. The item of a rank is
// the token's first copy there; the other copies only count.
#include "cuda/cuda.h"
#include "cuda/stable_rank.cuh"

namespace isoload::cuda {
namespace {

constexpr int kThreads = kMostWarps * 32;
template <int W>
constexpr int kWarps = W > 4 ? kMostWarps / 2 : kMostWarps;  // large sets take more registers

template <int W>
__device__ int members_below(const RankSet<W>& set, int end) {
  int members = 0;
  for (int w = 0; w < W; ++w) {
    const int left = end - 64 * w;
    const uint64_t below = left >= 64 ? ~uint64_t(0) : left > 0 ? (uint64_t(1) << left) - 1 : 0;
    members += __popcll(set.word[w] & below);
  }
  return members;
}

template <int W, class Slot>
struct Numbering {
  Chunks chunks;      // of the T * K copies
  const Slot* slots;  // [T, K]
  cpu::RowSpace of;
  int32_t *ranks, *numbers;  // [T, D]
  int64_t* counts;           // [2, R]

  __device__ int rank(int64_t i) const { return of.rank_of(slots[i]); }
  // The copy's rank; -1 for none, and for a copy behind its token's first copy there.
  __device__ int first_rank(int64_t i) const {
    const int mine = rank(i);
    bool first = mine < of.R;
    for (int64_t j = i / of.K * of.K; j < i; ++j) first &= rank(j) != mine;
    return first ? mine : -1;
  }
  // Keys 0..R-1 are of rows, R..2R-1 of copies behind their row's first.
  __device__ int key(int64_t i) const {
    const int mine = rank(i);
    if (mine == of.R) return -1;
    return first_rank(i) >= 0 ? mine : of.R + mine;
  }

  // A row stands in the column of its rank among the token's ranks; a token's first copy also ends its
  // columns.
  __device__ void write(int64_t i, int mine, int32_t number) const {
    const int64_t token = i / of.K;
    const int D = of.width();
    const bool leads = i == token * of.K;
    if (mine < 0 && !leads) return;
    RankSet<W> there;
    for (int64_t j = token * of.K; j < (token + 1) * of.K; ++j)
      if (const int other = rank(j); other < of.R) there.insert(other);
    if (mine >= 0) {
      const int column = members_below(there, mine);
      ranks[token * D + column] = mine;
      numbers[token * D + column] = number;
    }
    for (int d = leads ? members_below(there, of.R) : D; d < D; ++d) {
      ranks[token * D + d] = of.R;
      numbers[token * D + d] = -1;
    }
  }

  // By the last block: rows and extra [R] are how often all copies have a key of each half.
  __device__ void write_counts(const int32_t* rows, const int32_t* extra) const {
    for (int r = threadIdx.x; r < of.R; r += blockDim.x) {
      counts[r] = rows[r];
      counts[of.R + r] = rows[r] + extra[r];
    }
  }
};

// before [2R]: keys in the blocks before this one; in the last block, last [2R] are those of all blocks.
template <int W, class Slot>
__device__ void number(const Numbering<W, Slot>& in, const int32_t* before, int32_t* next) {
  rank_keys(
      in.chunks, in.of.R, [&](int64_t i) { return in.first_rank(i); }, [&](int r) { return before[r]; }, next,
      [&](int64_t i, int rank, int32_t count) { in.write(i, rank, count); });
}

// Of one chunk.
template <int W, class Slot>
__global__ void __launch_bounds__(kWarps<W> * 32, 1) number_alone_kernel(Numbering<W, Slot> in) {
  take_turn();
  const int keys = 2 * in.of.R;
  auto* const counts = reinterpret_cast<int32_t*>(shared_memory);  // [2R]
  int32_t *const before = counts + keys, *const next = before + keys;
  for (int k = threadIdx.x; k < keys; k += blockDim.x) before[k] = 0;
  count_keys<1>(0, in.chunks.n, keys, [&](int64_t i) { return in.key(i); }, counts);
  in.write_counts(counts, counts + in.of.R);
  number(in, before, next);
}

template <int W, class Slot>
__global__ void __launch_bounds__(kThreads, 1)
    number_count_kernel(Numbering<W, Slot> in, int32_t* chunk_counts) {
  take_turn();
  auto* const counts = reinterpret_cast<int32_t*>(shared_memory);
  count_chunk<1>(in.chunks, 2 * in.of.R, [&](int64_t i) { return in.key(i); }, counts, chunk_counts);
}

template <int W, class Slot>
__global__ void __launch_bounds__(kWarps<W> * 32, 1)
    number_rows_kernel(Numbering<W, Slot> in, const int32_t* chunk_counts) {
  take_turn();
  const int keys = 2 * in.of.R;
  auto* const before = reinterpret_cast<int32_t*>(shared_memory);  // [2R]
  int32_t *const counts = before + keys, *const next = counts + keys;
  add_up_rows(chunk_counts, keys, blockIdx.x, keys, [&](int k, int32_t sum) {
    before[k] = sum;
    counts[k] = sum + chunk_counts[int64_t(blockIdx.x) * keys + k];
  });
  __syncthreads();
  if (blockIdx.x == gridDim.x - 1) in.write_counts(counts, counts + in.of.R);
  number(in, before, next);
}

}  // namespace

int64_t number_rows_bytes(const cpu::RowSpace& of) {
  const int64_t chunks = Chunks::of(of.T * of.K).count();
  return chunks <= 1 ? 0 : chunks * 2 * of.R * int64_t(sizeof(int32_t));
}

template <class Slot>
const char* number_rows(const Slot* slots, const cpu::RowSpace& of, int32_t* ranks, int32_t* numbers,
                        int64_t* counts, void* global, void* stream) {
  const int64_t row = of.R * int64_t(sizeof(int32_t));
  return with_words(of.R, [&](auto words) -> const char* {
    constexpr int W = decltype(words)::value;
    const int warps = rank_warps(of.R, kWarps<W>, 4);
    if (warps == 0) return "number_rows: the ranks do not fit into shared memory";
    const Numbering<W, Slot> in{Chunks::of(of.T * of.K), slots, of, ranks, numbers, counts};
    const int64_t chunks = in.chunks.count(), bytes = (warps + 4) * row;
    if (chunks <= 1)  // of no rows the counts are written, too
      return launch(number_alone_kernel<W, Slot>, 1, warps * 32, bytes, stream, in);
    auto* const chunk_counts = static_cast<int32_t*>(global);
    const char* const error =
        launch(number_count_kernel<W, Slot>, chunks, kThreads, 2 * row, stream, in, chunk_counts);
    if (error != nullptr) return error;
    return launch(number_rows_kernel<W, Slot>, chunks, warps * 32, bytes, stream, in,
                  static_cast<const int32_t*>(chunk_counts));
  });
}

template const char* number_rows(const int32_t*, const cpu::RowSpace&, int32_t*, int32_t*, int64_t*, void*,
                                 void*);
template const char* number_rows(const int64_t*, const cpu::RowSpace&, int32_t*, int32_t*, int64_t*, void*,
                                 void*);

}  // namespace isoload::cuda
