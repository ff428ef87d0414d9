#include "cpu/cpu.h"

namespace isoload::cpu {

template <class Id, class Weight>
LayoutFault append_shared_expert(const Id* slots, const Weight* weights, const int32_t* ranks, int64_t T,
                                 int K, int n, const SharedLayout& layout, Id* new_slots,
                                 Weight* new_weights) {
  const int64_t routed = layout.routed_per_rank, S = layout.slots_per_rank;
  const Weight shared_weight = static_cast<Weight>(layout.weight);
  for (int64_t i = 0; i < T; ++i, slots += K, weights += K, ranks += n) {
    bool valid = false;
    for (int k = 0; k < K; ++k) {
      const int64_t id = slots[k];
      if (id < -1 || id > INT32_MAX) return {LayoutFault::bad_slot, id};
      const int64_t moved = id < 0 ? -1 : id / routed * S + id % routed;
      if (moved > INT32_MAX) return {LayoutFault::too_large, moved};
      valid |= id >= 0;
      *new_slots++ = static_cast<Id>(moved);
      *new_weights++ = id < 0 ? Weight(0) : weights[k];
    }
    for (int j = 0; j < n; ++j) {
      if (ranks[j] < -1) return {LayoutFault::bad_rank, ranks[j]};
      const bool placed = valid && ranks[j] >= 0;
      const int64_t slot = placed ? ranks[j] * S + routed + j : -1;
      if (slot > INT32_MAX) return {LayoutFault::too_large, slot};
      *new_slots++ = static_cast<Id>(slot);
      *new_weights++ = placed ? shared_weight : Weight(0);
    }
  }
  return {};
}

template LayoutFault append_shared_expert(const int32_t*, const float*, const int32_t*, int64_t, int, int,
                                          const SharedLayout&, int32_t*, float*);
template LayoutFault append_shared_expert(const int32_t*, const double*, const int32_t*, int64_t, int, int,
                                          const SharedLayout&, int32_t*, double*);
template LayoutFault append_shared_expert(const int64_t*, const float*, const int32_t*, int64_t, int, int,
                                          const SharedLayout&, int64_t*, float*);
template LayoutFault append_shared_expert(const int64_t*, const double*, const int32_t*, int64_t, int, int,
                                          const SharedLayout&, int64_t*, double*);

}  // namespace isoload::cpu
