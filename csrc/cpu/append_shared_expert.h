// append_shared_expert on one core.
#pragma once

#include "cpu/cpu.h"

namespace isoload::cpu {

template <class Id, class Weight>
LayoutFault append_shared_expert(const SharedAppend<Id, Weight>& in) {
  const Id* slots = in.slots;
  const Weight* weights = in.weights;
  const int32_t* ranks = in.ranks;
  Id* new_slots = in.new_slots;
  Weight* new_weights = in.new_weights;
  const int64_t routed = in.routed, S = in.S;
  for (int64_t i = 0; i < in.T; ++i, slots += in.K, weights += in.K, ranks += in.n) {
    bool valid = false;
    for (int k = 0; k < in.K; ++k) {
      const int64_t id = slots[k];
      if (id < -1 || id > INT32_MAX) return {LayoutFault::bad_slot, id};
      const int64_t moved = id < 0 ? -1 : id / routed * S + id % routed;
      if (moved > INT32_MAX) return {LayoutFault::too_large, moved};
      valid |= id >= 0;
      *new_slots++ = static_cast<Id>(moved);
      *new_weights++ = id < 0 ? Weight(0) : weights[k];
    }
    for (int j = 0; j < in.n; ++j) {
      if (ranks[j] < -1) return {LayoutFault::bad_rank, ranks[j]};
      const bool placed = valid && ranks[j] >= 0;
      const int64_t slot = placed ? ranks[j] * S + routed + j : -1;
      if (slot > INT32_MAX) return {LayoutFault::too_large, slot};
      *new_slots++ = static_cast<Id>(slot);
      *new_weights++ = placed ? in.shared_weight : Weight(0);
    }
  }
  return {};
}

}  // namespace isoload::cpu
