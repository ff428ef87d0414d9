// replica_tables: checks of a placement's slots.
#include "cpu/cpu.h"
#include "ops/device.h"
#include "ops/ops.h"
#include "ops/tensors.h"

namespace isoload::ops {

void replica_tables(const Tensor& slot_to_expert, int64_t num_ranks, int64_t num_experts, Tensor tables) {
  require_dtype(slot_to_expert, "slot_to_expert", ScalarType::Int);
  require(slot_to_expert.dim() == 1 || slot_to_expert.dim() == 2,
          "slot_to_expert must be [P] or [L, P], got ", shape_text(slot_to_expert));
  require(num_experts >= 1, "num_experts must be at least 1, got ", num_experts);
  const Tensor slots = dense(slot_to_expert);
  const int64_t P = slots.size(slots.dim() - 1);
  require(num_ranks >= 1 && num_ranks <= kMaxRanks, "num_ranks must be in 1..", kMaxRanks, ", got ",
          num_ranks);
  require(P >= num_ranks && P % num_ranks == 0,
          "slot_to_expert must have a multiple of num_ranks=", num_ranks, " slots, got ", P);
  const Tables checked(tables, P, num_experts);
  require(tables.is_contiguous() && checked.batch * P == slots.numel(),
          "tables must be contiguous, one row per layer of slot_to_expert ", shape_text(slots), ", got ",
          shape_text(tables));
  require_device(tables, "tables", slots, "slot_to_expert");
  if (on_cuda(slots, [&](auto stream) {
        const Scratch scratch(slots, cuda::replica_tables_bytes(checked.batch, num_ranks, num_experts));
        return cuda::replica_tables(data<int32_t>(slots), checked.batch, num_ranks, num_experts,
                                    P / num_ranks, mutable_data<int32_t>(tables), scratch.data(), stream);
      }))
    return;
  for (int64_t b = 0; b < checked.batch; ++b)
    cpu::replica_tables(data<int32_t>(slots) + b * P, num_ranks, num_experts, P / num_ranks,
                        mutable_data<int32_t>(tables) + b * ReplicaTables::size(num_experts, P));
}

}  // namespace isoload::ops
