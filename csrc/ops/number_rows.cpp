// number_rows: checks of the slots and of the ranks they lie on.
#include "cpu/number_rows.h"

#include "ops/op.h"

namespace isoload::ops {

std::tuple<Tensor, Tensor, Tensor> number_rows(const Tensor& slots_in, int64_t slots_per_rank,
                                               int64_t num_ranks) {
  require_columns(slots_in, "slots");
  require(slots_in.numel() <= INT32_MAX, "slots must have fewer than 2^31 copies, got ", slots_in.numel());
  require_in("num_ranks", num_ranks, 1, kMaxRanks);
  require(slots_per_rank >= 1 && slots_per_rank * num_ranks <= INT32_MAX,
          "slots_per_rank must be at least 1 and leave every slot below 2^31, got ", slots_per_rank);
  const Tensor slots = dense(slots_in);
  const cpu::RowSpace space{slots.size(0), static_cast<int>(slots.size(1)), static_cast<int>(num_ranks),
                            static_cast<int>(slots_per_rank)};
  const int64_t T = space.T, D = space.width();
  Tensor ranks = new_tensor(slots, {T, D}), numbers = new_tensor(slots, {T, D});
  Tensor counts = new_tensor(slots, {2, num_ranks}, ScalarType::Long);
  int32_t *const to_ranks = mutable_data<int32_t>(ranks), *const to_numbers = mutable_data<int32_t>(numbers);
  int64_t* const to_counts = mutable_data<int64_t>(counts);
  if (on_cuda(slots, [&](auto stream) {
        const Scratch scratch(slots, cuda::number_rows_bytes(space));
        return with_ids(slots, [&](auto* from) {
          return cuda::number_rows(from, space, to_ranks, to_numbers, to_counts, scratch.data(), stream);
        });
      }))
    return {ranks, numbers, counts};
  with_ids(slots, [&](auto* from) { cpu::number_rows(from, space, to_ranks, to_numbers, to_counts); });
  return {ranks, numbers, counts};
}

}  // namespace isoload::ops

ISOLOAD_OP(number_rows)
