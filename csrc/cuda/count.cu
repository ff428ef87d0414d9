// count: a block per part of the tokens, whose warps take their own runs of copies in order.
#include "cuda/count.cuh"

namespace isoload::cuda {
namespace {

constexpr int kNumberWarps = 32, kMostTurns = 2;
constexpr int kPieces = 8, kRun = kNumberWarps / kPieces;

// A warp's counters of the experts, two in a word, [num_words(E)]: neither runs over in what a block takes at
// once.
static_assert(kNumberWarps * 32 * kMostTurns <= UINT16_MAX);
__host__ __device__ constexpr int num_words(int E) { return (E + 1) / 2; }
// Odd: no multiple of the banks, in which the pieces of add_up would all meet.
__host__ __device__ constexpr int row_stride(int E) { return num_words(E) | 1; }

// counters [warps, row_stride(E)], how often each warp has an expert, become how often it came before the
// warp. kPieces lanes take a word, a run of warps each; finish(w, sum) gets what came in all.
template <class Finish>
__device__ void add_up(int warps, int E, uint32_t* counters, Finish&& finish) {
  const int piece = threadIdx.x % kPieces, words = num_words(E), stride = row_stride(E);
  for (int first = 0; first < words; first += blockDim.x / kPieces) {
    const int w = first + threadIdx.x / kPieces, present = w < words ? warps - piece * kRun : 0;
    uint32_t* const mine = counters + piece * kRun * stride + w;
    uint32_t here[kRun], sum = 0;
#pragma unroll
    for (int a = 0; a < kRun; ++a) here[a] = a < present ? mine[a * stride] : 0;
#pragma unroll
    for (int a = 0; a < kRun; ++a) sum += here[a];
    uint32_t upto = sum;
    for (int far = 1; far < kPieces; far *= 2) {
      const uint32_t other = __shfl_up_sync(0xffffffffu, upto, far);
      if (piece >= far) upto += other;
    }
    uint32_t before = upto - sum;
#pragma unroll
    for (int a = 0; a < kRun; ++a) {
      if (a < present) mine[a * stride] = before;
      before += here[a];
    }
    if (w < words && piece == kPieces - 1) finish(w, upto);
  }
}

// number: how many of the warp's copies before have the same expert; counter [E]: how many it has in all.
template <int kTurns, class Id>
__device__ void number_in_warp(const Id (&id)[kTurns], int E, uint16_t* counter, int32_t (&number)[kTurns]) {
  const int lane = threadIdx.x % 32;
  const unsigned before_me = (1u << lane) - 1;
  auto* const words = reinterpret_cast<uint32_t*>(counter);
  for (int w = lane; w < num_words(E); w += 32) words[w] = 0;
  __syncwarp();  // a warp's row is its own: no other has to come
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    const int e = expert_of(id[t], E);
    const unsigned peers = __match_any_sync(0xffffffffu, e);
    const int held = t > 0 && e >= 0 ? counter[e] : 0;
    if (t > 0) __syncwarp();  // all have read the counter
    if (e >= 0 && (peers & before_me) == 0) counter[e] = static_cast<uint16_t>(held + __popc(peers));
    if (t + 1 < kTurns) __syncwarp();
    number[t] = held + __popc(peers & before_me);
  }
}

// Where counts [E] come from: the only part; all parts, added up from 0; or a few ids, by blocks behind those
// of the parts, so that nothing has to be 0 before. none: the next kernel adds up the parts.
enum class Counts { none, of_part, of_parts, of_groups };

template <class Id>
struct Numbering {
  const Id* ids;               // [n]
  int64_t n, part, num_parts;  // part: its copies
  int E;
  Counts from;
  int32_t *counts, *numbers, *parts, *errors;

  // The block's part has an expert so often.
  __device__ void write(int e, int32_t sum) const {
    parts[int64_t(blockIdx.x) * E + e] = sum;
    if (from == Counts::of_part) counts[e] = sum;
    if (from == Counts::of_parts && sum > 0) atomicAdd(&counts[e], sum);
  }
};

// A block per part, whose warps take runs of 32 * kTurns copies in order: all of them at once, unless tokens
// have many choices. see(i, id): of every copy.
template <int kTurns, class Id, class Ids, class See>
__device__ void number_parts(const Numbering<Id>& in, const Ids& ids, See&& see) {
  if (blockIdx.x >= in.num_parts) {
    count_group<Id>(ids, in.n, in.E, static_cast<int>(blockIdx.x - in.num_parts), in.counts);
    return;
  }
  constexpr int kCopies = 32 * kTurns;  // of a warp
  const int E = in.E, warps = blockDim.x / 32, stride = row_stride(E);
  auto* const counters = reinterpret_cast<uint32_t*>(shared_memory);  // [warps, stride]
  auto* const counter = reinterpret_cast<uint16_t*>(counters + threadIdx.x / 32 * stride);
  auto* sums = reinterpret_cast<int32_t*>(counters + warps * stride);  // [E] after this step
  auto* before = sums + E;                                             // [E] after the last one
  const int first = threadIdx.x / 32 * kCopies + threadIdx.x % 32;
  const int64_t end = (blockIdx.x + 1) * in.part < in.n ? (blockIdx.x + 1) * in.part : in.n;
  int32_t faults = 0;
  int64_t begin = blockIdx.x * in.part;
  for (bool again = false, last = false; !last; again = true, begin += warps * kCopies) {
    last = end - begin <= warps * kCopies;
    const int copies = last ? static_cast<int>(end - begin) : warps * kCopies;
    Id id[kTurns];
    int32_t number[kTurns];
    fetch_ids<32>(ids, begin + first, copies - first, id);
    number_in_warp(id, E, counter, number);
    __syncthreads();
    add_up((copies + kCopies - 1) / kCopies, E, counters, [&](int w, uint32_t both) {
#pragma unroll
      for (int e = 2 * w; e < 2 * w + 2; ++e, both >>= 16) {
        if (e >= E) break;
        const int32_t sum = static_cast<int32_t>(both & 0xffff) + (again ? before[e] : 0);
        if (last)
          in.write(e, sum);
        else
          sums[e] = sum;
      }
    });
    __syncthreads();
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      const int e = expert_of(id[t], E);
      number[t] = e < 0 ? -1 : number[t] + counter[e] + (again ? before[e] : 0);
    }
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      faults |= fault(id[t], E);
      if (first + 32 * t < copies) {
        in.numbers[begin + first + 32 * t] = number[t];
        see(begin + first + 32 * t, id[t]);
      }
    }
    __syncwarp();  // all have read: the next copies start from 0
    int32_t* const oldest = before;
    before = sums, sums = oldest;
  }
  report(in.errors, faults);
}

template <int kTurns, class Id>
__global__ void __launch_bounds__(kNumberWarps * 32) count_numbered_kernel(Numbering<Id> in) {
  take_turn();
  number_parts<kTurns>(in, in.ids, [](int64_t, Id) {});
}

template <int kTurns, class Id>
__global__ void __launch_bounds__(kNumberWarps * 32, 1)
    count_columns_kernel(Numbering<Id> in, WithShared<Id> ids, Id* columns) {
  take_turn();
  number_parts<kTurns>(in, ids, [&](int64_t i, Id id) { columns[i] = id; });
}

}  // namespace

template <class Id>
const char* count(const Id* ids, int64_t T, int K, int num_routed, int num_shared, Id* columns,
                  const cpu::Counts& out, void* stream) {
  const int E = num_routed + num_shared, width = K + num_shared, stride = row_stride(E);
  const int warps = rank_warps(stride, kNumberWarps, 4);  // 4: the sums
  if (warps == 0) return "more experts than a block can count";
  const int64_t num_parts = cpu::num_parts(T), part = cpu::kPartRows * width, lanes = 32 * warps;
  const bool grouped = few(T * width, E) && lanes == kAloneThreads;
  const Counts from = out.counts == nullptr ? Counts::none
                      : num_parts == 1      ? Counts::of_part
                      : grouped             ? Counts::of_groups
                                            : Counts::of_parts;
  if (from == Counts::of_parts)
    if (const char* error = clear(out.counts, E, stream)) return error;
  const int64_t words = warps * stride + (part > kMostTurns * lanes ? 2 * E : 0);
  const int64_t bytes = words * int64_t(sizeof(uint32_t));
  const int64_t blocks = num_parts + (from == Counts::of_groups ? num_groups(E) : 0);
  const Numbering<Id> in{ids,  T * width,  part,        num_parts, E,
                         from, out.counts, out.numbers, out.parts, error_word()};
  const bool once = part <= lanes;  // a lane has one copy
  if (num_shared == 0)
    return launch(once ? count_numbered_kernel<1, Id> : count_numbered_kernel<kMostTurns, Id>, blocks,
                  static_cast<int>(lanes), bytes, stream, in);
  const WithShared<Id> all{ids, K, num_routed, E, Divisor(width)};
  return launch(once ? count_columns_kernel<1, Id> : count_columns_kernel<kMostTurns, Id>, blocks,
                static_cast<int>(lanes), bytes, stream, in, all, columns);
}

template const char* count(const int32_t*, int64_t, int, int, int, int32_t*, const cpu::Counts&, void*);
template const char* count(const int64_t*, int64_t, int, int, int, int64_t*, const cpu::Counts&, void*);

}  // namespace isoload::cuda
