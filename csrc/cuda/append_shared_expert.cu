// append_shared_expert: a lane per new slot; rows are short, so a shared copy looks at its token's slots
// itself.
#include "cuda/cuda.h"
#include "cuda/launch.cuh"

namespace isoload::cuda {
namespace {

constexpr int kThreads = 256;

template <class Id, class Weight>
__global__ void __launch_bounds__(kThreads)
    append_shared_expert_kernel(SharedAppend<Id, Weight> in, int32_t* errors) {
  take_turn();
  const int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= in.T * (in.K + in.n)) return;
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
  if (!legal || slot > INT32_MAX) report(errors, kAppendedSlot);
  if (slot > INT32_MAX) slot = -1;
  in.new_slots[at] = static_cast<Id>(slot);
  in.new_weights[at] = slot < 0 ? Weight(0) : weight;
}

}  // namespace

template <class Id, class Weight>
const char* append_shared_expert(const SharedAppend<Id, Weight>& in, void* stream) {
  const int64_t blocks = (in.T * (in.K + in.n) + kThreads - 1) / kThreads;
  return launch(append_shared_expert_kernel<Id, Weight>, blocks, kThreads, 0, stream, in, error_word());
}

template const char* append_shared_expert(const SharedAppend<int32_t, float>&, void*);
template const char* append_shared_expert(const SharedAppend<int32_t, double>&, void*);
template const char* append_shared_expert(const SharedAppend<int64_t, float>&, void*);
template const char* append_shared_expert(const SharedAppend<int64_t, double>&, void*);

}  // namespace isoload::cuda
