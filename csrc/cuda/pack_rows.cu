// pack_rows: a block per token reads its row once and writes it to every rank that it goes to; with a
// capacity more blocks make the padding rows, a warp each.
#include <type_traits>

#include "cuda/cuda.h"
#include "cuda/launch.cuh"

namespace isoload::cuda {

using cpu::Packing;

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kMostRows = 16;  // of a token whose places are found at a time

struct alignas(16) Bytes16 {
  uint64_t low, high;
};
// What a lane moves at a time, of so many bytes.
template <int N>
using Bytes = std::conditional_t<N == 16, Bytes16, std::conditional_t<N == 4, int32_t, char>>;

// Where the rows to a rank start. By a whole warp, for the same rank.
template <class Slot, class Weight>
__device__ int64_t first_row(const Packing<Slot, Weight>& p, int rank) {
  if (p.in.capacity > 0) return rank * p.in.capacity;
  long long before = 0;
  for (int r = threadIdx.x % 32; r < rank; r += 32) before += p.counts[r];
  for (int step = 16; step > 0; step /= 2) before += __shfl_xor_sync(0xffffffffu, before, step);
  return before;
}

// The slots and weights of a row's copies; of padding none.
template <class Slot, class Weight>
__device__ void write_copy(const Packing<Slot, Weight>& p, int64_t row, int64_t token, int rank, int k) {
  const cpu::RowSpace& space = p.in.space;
  const bool real = token < space.T;
  const int64_t slot = real ? static_cast<int64_t>(p.slots[token * space.K + k]) : -1;
  const bool here = real && space.rank_of(slot) == rank;
  char* const to = p.out.payload + row * p.in.bytes;
  reinterpret_cast<int32_t*>(to + p.in.slots_at)[k] =
      here ? static_cast<int32_t>(slot - int64_t(rank) * space.S) : -1;
  reinterpret_cast<Weight*>(to + p.in.weights_at)[k] = here ? p.weights[token * space.K + k] : Weight(0);
}

// Vector: what divides row_bytes and the addresses.
template <class Vector, class Slot, class Weight>
__device__ void pack_token(const Packing<Slot, Weight>& p, int64_t token) {
  __shared__ int64_t rows[kMostRows];
  const int D = p.in.space.width(), K = p.in.space.K, R = p.in.space.R;
  const int64_t n = p.in.row_bytes / int64_t(sizeof(Vector));
  const auto* const from = reinterpret_cast<const Vector*>(p.x + token * p.in.row_bytes);
  for (int start = 0; start < D; start += kMostRows) {
    const int here = D - start < kMostRows ? D - start : kMostRows;
    __syncthreads();  // all have read the rows before
    for (int d = threadIdx.x / 32; d < here; d += kWarps) {
      const int64_t at = token * D + start + d;
      const int rank = p.ranks[at];
      const int64_t row = rank == R ? p.in.num_rows : first_row(p, rank) + p.numbers[at];
      if (threadIdx.x % 32 != 0) continue;
      rows[d] = row;
      p.out.token_to_rows[at] = row;
      if (rank == R) continue;
      p.out.row_to_token[row] = token;
      p.out.row_to_rank[row] = rank;
    }
    __syncthreads();
    for (int64_t v = threadIdx.x; v < n; v += kThreads) {
      const Vector value = from[v];
      for (int d = 0; d < here && rows[d] < p.in.num_rows; ++d)
        reinterpret_cast<Vector*>(p.out.payload + rows[d] * p.in.bytes)[v] = value;
    }
    for (int i = threadIdx.x; i < here * K; i += kThreads)
      if (rows[i / K] < p.in.num_rows)
        write_copy(p, rows[i / K], token, p.ranks[token * D + start + i / K], i % K);
  }
}

template <class Vector, class Slot, class Weight>
__device__ void pad(const Packing<Slot, Weight>& p, int64_t row) {
  const int rank = static_cast<int>(row / p.in.capacity), lane = threadIdx.x % 32;
  if (row % p.in.capacity < p.counts[rank]) return;
  auto* const to = reinterpret_cast<Vector*>(p.out.payload + row * p.in.bytes);
  for (int64_t v = lane; v < p.in.row_bytes / int64_t(sizeof(Vector)); v += 32) to[v] = Vector{};
  for (int k = lane; k < p.in.space.K; k += 32) write_copy(p, row, p.in.space.T, rank, k);
  if (lane != 0) return;
  p.out.row_to_token[row] = p.in.space.T;
  p.out.row_to_rank[row] = p.in.space.R;
}

template <int N, class Slot, class Weight>
__global__ void __launch_bounds__(kThreads) pack_rows_kernel(Packing<Slot, Weight> p) {
  take_turn();
  const int64_t T = p.in.space.T;
  if (blockIdx.x < T) return pack_token<Bytes<N>>(p, blockIdx.x);
  const int64_t row = (blockIdx.x - T) * kWarps + threadIdx.x / 32;
  if (row < p.in.num_rows) pad<Bytes<N>>(p, row);
}

}  // namespace

template <class Slot, class Weight>
const char* pack_rows(const Packing<Slot, Weight>& p, void* stream) {
  const int64_t padding = p.in.capacity > 0 ? (p.in.num_rows + kWarps - 1) / kWarps : 0;
  const int64_t blocks = p.in.space.T + padding;
  const uint64_t odd = reinterpret_cast<uint64_t>(p.x) | static_cast<uint64_t>(p.in.row_bytes);
  if (odd % 16 == 0) return launch(pack_rows_kernel<16, Slot, Weight>, blocks, kThreads, 0, stream, p);
  if (odd % 4 == 0) return launch(pack_rows_kernel<4, Slot, Weight>, blocks, kThreads, 0, stream, p);
  return launch(pack_rows_kernel<1, Slot, Weight>, blocks, kThreads, 0, stream, p);
}

template const char* pack_rows(const Packing<int32_t, float>&, void*);
template const char* pack_rows(const Packing<int32_t, double>&, void*);
template const char* pack_rows(const Packing<int64_t, float>&, void*);
template const char* pack_rows(const Packing<int64_t, double>&, void*);

}  // namespace isoload::cuda
