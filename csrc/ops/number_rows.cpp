// number_rows: checks of the slots and of the ranks they lie on.
#include "cpu/cpu.h"
#include "ops/op.h"

namespace isoload::ops {

std::tuple<Tensor, Tensor, Tensor> number_rows(const Tensor& slots_in, int64_t slots_per_rank,
                                               int64_t num_ranks) {
  require_ids(slots_in, "slots");
  require(slots_in.dim() == 2, "slots must be [T, K], got ", shape_text(slots_in));
  require(slots_in.numel() <= INT32_MAX, "slots must have fewer than 2^31 copies, got ", slots_in.numel());
  require(num_ranks >= 1 && num_ranks <= kMaxRanks, "num_ranks must be in 1..", kMaxRanks, ", got ",
          num_ranks);
  require(slots_per_rank >= 1 && slots_per_rank * num_ranks <= INT32_MAX,
          "slots_per_rank must be at least 1 and leave every slot below 2^31, got ", slots_per_rank);
  const Tensor slots = dense(slots_in);
  const cpu::RowSpace space{slots.size(0), static_cast<int>(slots.size(1)), static_cast<int>(num_ranks),
                            static_cast<int>(slots_per_rank)};
  const int64_t T = space.T, D = space.width();
  Tensor ranks = new_empty(slots, {T, D}), numbers = new_empty(slots, {T, D});
  Tensor counts = new_empty(slots, {2, num_ranks}, ScalarType::Long);
  int32_t *const to_ranks = mutable_data<int32_t>(ranks), *const to_numbers = mutable_data<int32_t>(numbers);
  int64_t* const to_counts = mutable_data<int64_t>(counts);
  if (on_cuda(slots, [&](auto stream) {
        const Scratch scratch(slots, cuda::number_rows_bytes(space));
        auto launch = [&](auto id) {
          using Slot = decltype(id);
          return cuda::number_rows(data<Slot>(slots), space, to_ranks, to_numbers, to_counts, scratch.data(),
                                   stream);
        };
        return slots.scalar_type() == ScalarType::Int ? launch(int32_t()) : launch(int64_t());
      }))
    return {ranks, numbers, counts};
  if (slots.scalar_type() == ScalarType::Int)
    cpu::number_rows(data<int32_t>(slots), space, to_ranks, to_numbers, to_counts);
  else
    cpu::number_rows(data<int64_t>(slots), space, to_ranks, to_numbers, to_counts);
  return {ranks, numbers, counts};
}

}  // namespace isoload::ops

ISOLOAD_OP(number_rows)
