// append_shared_expert: a lane per new slot; rows are short, so a shared copy looks at its token's slots
// itself.
#include "cuda/cuda.h"
#include "cuda/launch.cuh"

namespace isoload::cuda {
namespace {

constexpr int kThreads = 256;

template <class Id, class Weight>
struct Layout {
  const Id* slots;        // [T, K]
  const Weight* weights;  // [T, K]
  const int32_t* ranks;   // [T, n]
  int64_t total;          // T * (K + n)
  int K, n;
  int64_t routed, S;  // slots per rank before and after
  Weight shared_weight;
  Id* new_slots;        // [T, K + n]
  Weight* new_weights;  // [T, K + n]
  int32_t* errors;      // the device's error word
};

template <class Id, class Weight>
__global__ void __launch_bounds__(kThreads) append_shared_expert_kernel(Layout<Id, Weight> in) {
  take_turn();
  const int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= in.total) return;
  const int64_t token = at / (in.K + in.n);
  const int column = static_cast<int>(at % (in.K + in.n));
  const Id* const slots = in.slots + token * in.K;
  int64_t slot = -1;
  Weight weight = 0;
  bool legal;
  if (column < in.K) {
    const int64_t id = slots[column];
    legal = id >= -1 && id <= INT32_MAX;
    if (id >= 0 && id <= INT32_MAX) slot = id / in.routed * in.S + id % in.routed;
    weight = in.weights[token * in.K + column];
  } else {
    const int32_t rank = in.ranks[token * in.n + column - in.K];
    bool valid = false;
    legal = rank >= -1;
    for (int k = 0; k < in.K; ++k) valid |= slots[k] >= 0;
    if (valid && rank >= 0) slot = rank * in.S + in.routed + column - in.K;
    weight = in.shared_weight;
  }
  if (!legal || slot > INT32_MAX) report(in.errors, kAppendedSlot);
  if (slot > INT32_MAX) slot = -1;
  in.new_slots[at] = static_cast<Id>(slot);
  in.new_weights[at] = slot < 0 ? Weight(0) : weight;
}

}  // namespace

template <class Id, class Weight>
const char* append_shared_expert(const Id* slots, const Weight* weights, const int32_t* ranks, int64_t T,
                                 int K, int n, const SharedLayout& layout, Id* new_slots, Weight* new_weights,
                                 void* stream) {
  const Layout<Id, Weight> in{slots,
                              weights,
                              ranks,
                              T * (K + n),
                              K,
                              n,
                              layout.routed_per_rank,
                              layout.slots_per_rank,
                              static_cast<Weight>(layout.weight),
                              new_slots,
                              new_weights,
                              error_word()};
  return launch(append_shared_expert_kernel<Id, Weight>, (in.total + kThreads - 1) / kThreads, kThreads, 0,
                stream, in);
}

template const char* append_shared_expert(const int32_t*, const float*, const int32_t*, int64_t, int, int,
                                          const SharedLayout&, int32_t*, float*, void*);
template const char* append_shared_expert(const int32_t*, const double*, const int32_t*, int64_t, int, int,
                                          const SharedLayout&, int32_t*, double*, void*);
template const char* append_shared_expert(const int64_t*, const float*, const int32_t*, int64_t, int, int,
                                          const SharedLayout&, int64_t*, float*, void*);
template const char* append_shared_expert(const int64_t*, const double*, const int32_t*, int64_t, int, int,
                                          const SharedLayout&, int64_t*, double*, void*);

}  // namespace isoload::cuda
