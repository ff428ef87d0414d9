// group_copies: checks of the slots, the group and its places.
#include "cpu/group_copies.h"

#include "ops/op.h"

namespace isoload::ops {

std::tuple<Tensor, Tensor, Tensor, Tensor> group_copies(const Tensor& slots_in, int64_t first,
                                                        int64_t num_slots, int64_t num_places) {
  require_ids(slots_in, "slots");
  require(slots_in.dim() == 2, "slots must be [N, K], got ", shape_text(slots_in));
  const int64_t n = slots_in.numel();
  require(n <= INT32_MAX, "slots must have fewer than 2^31 copies, got ", n);
  require(first >= 0, "first must be at least 0, got ", first);
  require(num_slots >= 0 && num_slots <= INT32_MAX, "num_slots must be in 0..2^31-1, got ", num_slots);
  require(num_places >= 0 && num_places <= n, "num_places must be in 0..", n, " (N*K), got ", num_places);
  const Tensor slots = dense(slots_in);
  const cpu::CopyGroup group{n, first, static_cast<int>(num_slots), num_places};
  Tensor copy = new_tensor(slots, {num_places}, ScalarType::Long);
  Tensor slot = new_tensor(slots, {num_places}, ScalarType::Long);
  Tensor ends = new_tensor(slots, {num_slots});
  Tensor position = new_tensor(slots, {slots.size(0), slots.size(1)}, ScalarType::Long);
  const cpu::Groups out{mutable_data<int64_t>(copy), mutable_data<int64_t>(slot), mutable_data<int32_t>(ends),
                        mutable_data<int64_t>(position)};
  if (on_cuda(slots, [&](auto stream) {
        const Scratch scratch(slots, cuda::group_copies_bytes(group));
        return with_ids(
            slots, [&](auto* from) { return cuda::group_copies(from, group, out, scratch.data(), stream); });
      }))
    return {copy, slot, ends, position};
  const int64_t present = with_ids(slots, [&](auto* from) { return cpu::group_copies(from, group, out); });
  require(present <= num_places, "num_places must be at least the number of copies present (", present,
          "), got ", num_places);
  return {copy, slot, ends, position};
}

}  // namespace isoload::ops

ISOLOAD_OP(group_copies)
