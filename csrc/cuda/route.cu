// route, route_sampled.
//
// route: the i-th copy of an expert, in token order, goes to the first replica whose cumulative share exceeds
// i. One kernel for a few copies (stable_rank.cuh), for more two: count, deal. With prefer_visited three:
// ask, grant, deal, where a copy with a choice first asks for a replica on a rank that its token visits
// anyway.
#include "cuda/cuda.h"
#include "cuda/stable_rank.cuh"
#include "random_word.h"

namespace isoload::cuda {
namespace {

constexpr int kThreads = kRankWarps * 32;
constexpr int kAhead = 8;
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

// Every block counts the copies before its own chunk itself.
template <class Id>
__global__ void __launch_bounds__(kMostWarps * 32) route_alone_kernel(Copies<Id> in) {
  take_turn();
  auto* const counts = reinterpret_cast<int32_t*>(shared_memory);  // [E]
  auto expert = [&](int64_t i) { return in.expert(i); };
  count_keys<kAhead>(0, in.chunks.begin(blockIdx.x), in.E, expert, counts);
  rank_keys(
      in.chunks, in.E, expert, [&](int e) { return counts[e]; }, counts + in.E,
      [&](int64_t i, int e, int32_t rank) { in.set(i, e, rank, in.share); });
}

template <class Id>
__global__ void __launch_bounds__(kThreads) route_count_kernel(Copies<Id> in, int32_t* expert_counts) {
  take_turn();
  auto* const counts = reinterpret_cast<int32_t*>(shared_memory);
  count_chunk<kAhead>(in.chunks, in.E, [&](int64_t i) { return in.expert(i); }, counts, expert_counts);
}

// Of kUnset slots only if some are set; left [P]: what the share still holds then.
template <bool kSomeSet, class Id>
__global__ void __launch_bounds__(kMostWarps * 32, 1)
    route_deal_kernel(Copies<Id> in, const int32_t* expert_counts, const int32_t* left) {
  take_turn();
  auto* const before = reinterpret_cast<int32_t*>(shared_memory);  // [E]
  add_up_chunks(expert_counts, in.E, before);
  rank_keys(
      in.chunks, in.E, [&](int64_t i) { return kSomeSet ? in.unset_expert(i) : in.expert(i); },
      [&](int e) { return before[e]; }, before + in.E,
      [&](int64_t i, int e, int32_t rank) {
        if (!kSomeSet || in.slots[i] == kUnset) in.set(i, e, rank, left);
      });
}

// slots: the slot that a copy asks for, or kUnset. slot_counts [chunks, P]: askers per slot.
template <class Id>
__global__ void __launch_bounds__(kThreads) route_ask_kernel(Copies<Id> in, int32_t* slot_counts) {
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
  count_chunk<kAhead>(in.chunks, in.E, [&](int64_t i) { return in.unset_expert(i); }, next, expert_counts);
}

// route_sampled: a lane per copy; every copy has its own word of the stream. A sum of weights that is not
// positive gives -1.

// The same float32 operations in the same order as on the CPU.
__device__ int draw_slot(const ReplicaTables& t, int e, const float* weights, uint64_t word) {
  const int first = t.offsets[e], last = t.offsets[e + 1];
  float total = 0;
  for (int j = first; j < last; ++j) total += weights[t.slots[j]];
  if (!(total > 0)) return -1;
  float left = static_cast<float>(word >> 40) * 0x1p-24f * total;
  int chosen = -1;
  for (int j = first; j < last; ++j) {
    const float weight = weights[t.slots[j]];
    if (weight > 0) chosen = t.slots[j];  // rounding may leave a crumb after the last: it keeps that one
    if (left < weight) break;
    left -= weight;
  }
  return chosen;
}

template <class Id>
__global__ void __launch_bounds__(kThreads)
    route_sampled_kernel(const Id* ids, int64_t n, int E, ReplicaTables t, const float* weights, Stream words,
                         Id* slots, int32_t* errors) {
  take_turn();
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  const Id id = ids[i];
  const bool is_expert = static_cast<uint64_t>(id) < static_cast<uint64_t>(E);
  const int slot = is_expert ? draw_slot(t, static_cast<int>(id), weights, random_word(words.key(), i)) : -1;
  slots[i] = static_cast<Id>(slot);
  if (slot < 0 && id != -1) report(errors, is_expert ? kSampledWeights : kSampledId);
}

}  // namespace

static bool is_alone(const Route& in) { return !in.prefer_visited && in.T * in.K <= kFewItems; }

// Counts per chunk and expert; with prefer_visited also per chunk and slot, and what the share still holds.
int64_t route_bytes(const Route& in) {
  if (is_alone(in)) return 0;
  const int64_t chunks = Chunks::of(in.T * in.K).count();
  return (chunks * in.E + (in.prefer_visited ? chunks * in.P + in.P : 0)) * int64_t(sizeof(int32_t));
}

template <class Id>
static const char* route_visited(const Route& in, const Copies<Id>& copies, int warps, int64_t bytes,
                                 void* global, void* stream) {
  const int64_t blocks = copies.chunks.count(), word = sizeof(int32_t);
  auto* const expert_counts = static_cast<int32_t*>(global);
  int32_t *const slot_counts = expert_counts + blocks * in.E, *const left = slot_counts + blocks * in.P;
  const int64_t ask_bytes = (in.E + int64_t(in.P)) * word;
  const char* error = launch(route_ask_kernel<Id>, blocks, kThreads, ask_bytes, stream, copies, slot_counts);
  if (!error)
    error = launch(route_grant_kernel<Id>, blocks, warps * 32, bytes, stream, copies, slot_counts,
                   expert_counts, left);
  if (!error)
    error =
        launch(route_deal_kernel<true, Id>, blocks, warps * 32, bytes, stream, copies, expert_counts, left);
  return error;
}

template <class Id>
const char* route(const Route& in, const Id* ids, Id* slots, void* global, void* stream) {
  const Copies<Id> copies{Chunks::of(in.T * in.K), ids,         slots, in.K, in.E, in.P, in.tables,
                          in.source_quota,         error_word()};
  const int64_t blocks = copies.chunks.count(), word = sizeof(int32_t);
  const int64_t keys = in.prefer_visited && in.P > in.E ? in.P : in.E;
  const int warps = rank_warps(keys, kMostWarps, 1);
  if (warps == 0) return "more experts or slots than a block can count";
  const int64_t bytes = (warps + 1) * keys * word;
  if (is_alone(in)) return launch(route_alone_kernel<Id>, blocks, warps * 32, bytes, stream, copies);
  if (in.prefer_visited) return route_visited(in, copies, warps, bytes, global, stream);
  auto* const expert_counts = static_cast<int32_t*>(global);
  if (const char* error =
          launch(route_count_kernel<Id>, blocks, kThreads, in.E * word, stream, copies, expert_counts))
    return error;
  return launch(route_deal_kernel<false, Id>, blocks, warps * 32, bytes, stream, copies, expert_counts,
                in.source_quota);
}

template const char* route(const Route&, const int32_t*, int32_t*, void*, void*);
template const char* route(const Route&, const int64_t*, int64_t*, void*, void*);

template <class Id>
const char* route_sampled(const Id* ids, int64_t n, int E, const ReplicaTables& tables, const float* weights,
                          const Stream& words, Id* slots, void* stream) {
  return launch(route_sampled_kernel<Id>, (n + kThreads - 1) / kThreads, kThreads, 0, stream, ids, n, E,
                tables, weights, words, slots, error_word());
}

template const char* route_sampled(const int32_t*, int64_t, int, const ReplicaTables&, const float*,
                                   const Stream&, int32_t*, void*);
template const char* route_sampled(const int64_t*, int64_t, int, const ReplicaTables&, const float*,
                                   const Stream&, int64_t*, void*);

}  // namespace isoload::cuda
