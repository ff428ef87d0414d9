// route_sampled: a lane per copy; every copy has its own word of the stream. A sum of weights that is not
// positive gives -1.
#include "cuda/cuda.h"
#include "cuda/stable_rank.cuh"
#include "random_word.h"

namespace isoload::cuda {
namespace {

constexpr int kThreads = kRankWarps * 32;

// The same float32 operations in the same order as on the CPU.
__device__ int draw_slot(const ReplicaTables& t, int e, const float* weights, uint64_t word) {
  float total = 0;
  for (int j = t.offsets[e]; j < t.offsets[e + 1]; ++j) total += weights[t.slots[j]];
  return total > 0 ? cpu::draw_slot(t, e, weights, total, word) : -1;
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
