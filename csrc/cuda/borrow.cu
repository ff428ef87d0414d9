// borrow, borrow_backward: rows between ranks by loads from peers' memory, led by the plan on the device.
//
// The grid is fixed by the shapes. Filled rows are laid end to end in chunks and the blocks take these in
// turn, so that all blocks work however few slots are filled. Each lane has 8 loads of 16 bytes underway:
// together 1 MB in 32 blocks, about what NVLink carries in the time of one load.
#include "cuda/cuda.h"
#include "cuda/launch.cuh"

namespace isoload::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMostStacks = 8;  // of one launch: a kernel's arguments have a fixed size

struct alignas(16) Bytes16 {
  uint32_t part[4];
};

struct Stacks {
  Rows rows[kMostStacks];
  int first, count;  // they are first.. of all W
};

__host__ __device__ int64_t chunks_of(int64_t n, int64_t chunk) { return (n + chunk - 1) / chunk; }

// f(chunk) for this block's chunks of the next row. turn: chunks until the block's next, over all rows.
template <class F>
__device__ void take_turns(int64_t& turn, int64_t chunks, F&& f) {
  for (; turn < chunks; turn += gridDim.x) f(turn);
  turn -= chunks;
}

__device__ bool aligned(uint64_t addresses) { return addresses % sizeof(Bytes16) == 0; }

constexpr int kCopyUnderway = 8;
constexpr int64_t kCopyChunk = int64_t(kThreads) * kCopyUnderway * sizeof(Bytes16);  // bytes

// All lanes of the block: the bytes begin..end of a row.
template <class Word>
__device__ void copy(const char* from, char* to, int64_t begin, int64_t end) {
  const Word* const source = reinterpret_cast<const Word*>(from);
  Word* const target = reinterpret_cast<Word*>(to);
  const int64_t n = end / sizeof(Word);
  Word held[kCopyUnderway];
  for (int64_t i = begin / sizeof(Word) + threadIdx.x; i < n; i += kThreads * kCopyUnderway) {
#pragma unroll
    for (int k = 0; k < kCopyUnderway; ++k)
      if (i + k * kThreads < n) held[k] = source[i + k * kThreads];
#pragma unroll
    for (int k = 0; k < kCopyUnderway; ++k)
      if (i + k * kThreads < n) target[i + k * kThreads] = held[k];
  }
}

// Dynamic shared memory: [spare_slots, stacks] where the row of each slot and stack comes from, null =
// nowhere.
__global__ void __launch_bounds__(kThreads) borrow_kernel(Borrowing in, Stacks stacks, int32_t* errors) {
  wait_for_kernel_ahead();
  auto* const sources = reinterpret_cast<const char**>(shared_memory);
  const int n = in.spare_slots * stacks.count;
  for (int i = threadIdx.x; i < n; i += kThreads) {
    const Home home = in.home_of(in.rank, i / stacks.count);
    const int w = i % stacks.count;
    const int64_t base = home.rank < 0 ? 0 : in.peer(home.rank, stacks.first + w);
    sources[i] = base == 0 ? nullptr : reinterpret_cast<const char*>(base) + home.row * stacks.rows[w].size;
    if (base == 0 && in.is_filled(in.rank, i / stacks.count)) report(errors, kBorrowedSlot);
  }
  __syncthreads();
  int64_t turn = blockIdx.x;
  for (int i = 0; i < n; ++i) {
    const char* const from = sources[i];
    if (from == nullptr) continue;
    const Rows& spare = stacks.rows[i % stacks.count];
    const int64_t size = spare.size;
    char* const to = static_cast<char*>(spare.data) + i / stacks.count * size;
    const uint64_t all = reinterpret_cast<uint64_t>(from) | reinterpret_cast<uint64_t>(to) | uint64_t(size);
    take_turns(turn, chunks_of(size, kCopyChunk), [&](int64_t chunk) {
      const int64_t begin = chunk * kCopyChunk, end = begin + kCopyChunk < size ? begin + kCopyChunk : size;
      if (aligned(all)) return copy<Bytes16>(from, to, begin, end);
      all % 4 == 0 ? copy<uint32_t>(from, to, begin, end) : copy<char>(from, to, begin, end);
    });
  }
}

constexpr int kSumUnderway = 4;
template <class Value>
constexpr int kVector = sizeof(Bytes16) / sizeof(Value);
template <class Value>
constexpr int64_t kSumChunk = int64_t(kThreads) * kSumUnderway * kVector<Value>;  // values

template <class Value, int N>
struct alignas(N * sizeof(Value) < 16 ? N * sizeof(Value) : 16) Pack {
  Value value[N];
};

// Which spare slots hold the experts of this rank's rows: a chain per row, by rank, then slot. In shared
// memory.
struct Chains {
  int32_t* row;   // [R * spare_slots] the row of each slot's expert, -1 = not of this rank
  int32_t* next;  // [R * spare_slots] the next slot with the same row, -1 = none
  int32_t* head;  // [num_rows] the first slot of each row
};

__device__ Chains find_chains(const Borrowing& in, int num_rows, int32_t* errors) {
  const int n = in.R * in.spare_slots;
  int32_t* const row = reinterpret_cast<int32_t*>(shared_memory);
  const Chains chains{row, row + n, row + 2 * n};
  for (int i = threadIdx.x; i < n; i += kThreads) {
    const Home home = in.home_of(i / in.spare_slots, i % in.spare_slots);
    chains.row[i] = home.rank == in.rank ? home.row : -1;
    const bool nowhere = home.rank < 0 || chains.row[i] >= num_rows;
    if (nowhere && in.is_filled(i / in.spare_slots, i % in.spare_slots)) report(errors, kBackwardSlot);
  }
  __syncthreads();
  for (int own = threadIdx.x; own < num_rows; own += kThreads) {
    int32_t head = -1;
    for (int i = n - 1; i >= 0; --i)
      if (chains.row[i] == own) chains.next[i] = head, head = i;
    chains.head[own] = head;
  }
  __syncthreads();
  return chains;
}

// The gradients of one row of stack w, in the pools that hold it.
template <class Value>
struct Gradients {
  const Borrowing& in;
  const int32_t* next;
  int head, w;
  int64_t size;

  // f(pool row) in the order of the sum.
  template <class F>
  __device__ void for_each(F&& f) const {
    for (int i = head; i >= 0; i = next[i])
      if (const int64_t pool = in.peer(i / in.spare_slots, w))
        f(reinterpret_cast<const Value*>(pool) + i % in.spare_slots * size);
  }
};

// All lanes of the block: total[begin..end) += the gradients, N values at a time, rounded once.
template <int N, class Value, class Total>
__device__ void add(const Gradients<Value>& gradients, Total* total, int64_t begin, int64_t end) {
  constexpr int64_t kStep = int64_t(kThreads) * N;
  for (int64_t i = begin + int64_t(threadIdx.x) * N; i < end; i += kStep * kSumUnderway) {
    Pack<Total, N> held[kSumUnderway];
    decltype(widen(Value())) sums[kSumUnderway][N];
#pragma unroll
    for (int k = 0; k < kSumUnderway; ++k)
      if (i + k * kStep < end) held[k] = *reinterpret_cast<Pack<Total, N>*>(total + i + k * kStep);
#pragma unroll
    for (int k = 0; k < kSumUnderway; ++k)
#pragma unroll
      for (int v = 0; v < N; ++v)
        if (i + k * kStep < end) sums[k][v] = widen(held[k].value[v]);
    gradients.for_each([&](const Value* row) {
      Pack<Value, N> came[kSumUnderway];
#pragma unroll
      for (int k = 0; k < kSumUnderway; ++k)
        if (i + k * kStep < end) came[k] = *reinterpret_cast<const Pack<Value, N>*>(row + i + k * kStep);
#pragma unroll
      for (int k = 0; k < kSumUnderway; ++k)
#pragma unroll
        for (int v = 0; v < N; ++v)
          if (i + k * kStep < end) sums[k][v] += widen(came[k].value[v]);
    });
#pragma unroll
    for (int k = 0; k < kSumUnderway; ++k) {
      if (i + k * kStep >= end) continue;
#pragma unroll
      for (int v = 0; v < N; ++v) narrow(sums[k][v], held[k].value[v]);
      *reinterpret_cast<Pack<Total, N>*>(total + i + k * kStep) = held[k];
    }
  }
}

template <class Value, class Total>
__global__ void __launch_bounds__(kThreads)
    borrow_backward_kernel(Borrowing in, Stacks stacks, int num_rows, int32_t* errors) {
  wait_for_kernel_ahead();
  const Chains chains = find_chains(in, num_rows, errors);
  int64_t turn = blockIdx.x;
  for (int row = 0; row < num_rows; ++row) {
    if (chains.head[row] < 0) continue;
    for (int w = 0; w < stacks.count; ++w) {
      const int64_t size = stacks.rows[w].size;
      const Gradients<Value> gradients{in, chains.next, chains.head[row], stacks.first + w, size};
      Total* const total = static_cast<Total*>(stacks.rows[w].data) + row * size;
      uint64_t all = reinterpret_cast<uint64_t>(total) | uint64_t(size) * sizeof(Value);
      gradients.for_each([&](const Value* pool) { all |= reinterpret_cast<uint64_t>(pool); });
      take_turns(turn, chunks_of(size, kSumChunk<Value>), [&](int64_t chunk) {
        const int64_t begin = chunk * kSumChunk<Value>, after = begin + kSumChunk<Value>;
        const int64_t end = after < size ? after : size;
        aligned(all) ? add<kVector<Value>>(gradients, total, begin, end)
                     : add<1>(gradients, total, begin, end);
      });
    }
  }
}

// launch(stacks, blocks) for up to kMostStacks stacks at a time, until one is refused. rows: at most so many
// are worked on in each.
template <class Launch>
const char* launch_stacks(int W, const Rows* given, int64_t rows, int64_t chunk, int64_t blocks,
                          Launch&& launch) {
  const char* error = nullptr;
  for (int first = 0; first < W && error == nullptr; first += kMostStacks) {
    Stacks stacks{{}, first, W - first < kMostStacks ? W - first : kMostStacks};
    int64_t chunks = 0;
    for (int w = 0; w < stacks.count; ++w) {
      stacks.rows[w] = given[first + w];
      chunks += rows * chunks_of(given[first + w].size, chunk);
    }
    error = launch(stacks, chunks < blocks ? chunks : blocks);
  }
  return error;
}

}  // namespace

const char* borrow(const Borrowing& in, const Rows* spare, int64_t blocks, void* stream) {
  return launch_stacks(
      in.W, spare, in.spare_slots, kCopyChunk, blocks, [&](const Stacks& stacks, int64_t grid) {
        const int64_t bytes = int64_t(in.spare_slots) * stacks.count * sizeof(char*);
        return launch(borrow_kernel, grid, kThreads, bytes, stream, in, stacks, error_word());
      });
}

template <class Value, class Total>
const char* borrow_backward(const Borrowing& in, const Rows* totals, int64_t num_rows, int64_t blocks,
                            void* stream) {
  const int64_t slots = int64_t(in.R) * in.spare_slots, rows = num_rows < slots ? num_rows : slots;
  const int64_t bytes = (2 * slots + num_rows) * int64_t(sizeof(int32_t));
  return launch_stacks(in.W, totals, rows, kSumChunk<Value>, blocks, [&](const Stacks& stacks, int64_t grid) {
    return launch(borrow_backward_kernel<Value, Total>, grid, kThreads, bytes, stream, in, stacks, num_rows,
                  error_word());
  });
}

template const char* borrow_backward<double, double>(const Borrowing&, const Rows*, int64_t, int64_t, void*);
template const char* borrow_backward<float, float>(const Borrowing&, const Rows*, int64_t, int64_t, void*);
template const char* borrow_backward<BFloat16, float>(const Borrowing&, const Rows*, int64_t, int64_t, void*);
template const char* borrow_backward<BFloat16, BFloat16>(const Borrowing&, const Rows*, int64_t, int64_t,
                                                         void*);
template const char* borrow_backward<Float16, float>(const Borrowing&, const Rows*, int64_t, int64_t, void*);
template const char* borrow_backward<Float16, Float16>(const Borrowing&, const Rows*, int64_t, int64_t,
                                                       void*);

}  // namespace isoload::cuda
