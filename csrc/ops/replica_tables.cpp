// replica_tables: checks of a placement's slots.
#include "algorithms/replica_tables.h"

#include "ops/op.h"
#include "ops/plan_layers.h"

namespace isoload::ops {

void replica_tables(const Tensor& slot_to_expert, int64_t num_ranks, int64_t num_experts, Tensor tables) {
  require_dtype(slot_to_expert, "slot_to_expert", ScalarType::Int);
  require(slot_to_expert.dim() == 1 || slot_to_expert.dim() == 2,
          "slot_to_expert must be [P] or [L, P], got ", shape_text(slot_to_expert));
  require(num_experts >= 1, "num_experts must be at least 1, got ", num_experts);
  const Tensor slots = dense(slot_to_expert);
  const int64_t P = slots.size(slots.dim() - 1);
  require_in("num_ranks", num_ranks, 1, kMaxRanks);
  require(P >= num_ranks && P % num_ranks == 0,
          "slot_to_expert must have a multiple of num_ranks=", num_ranks, " slots, got ", P);
  const Tables checked(tables, P, num_experts, num_ranks, false);
  require(tables.is_contiguous() && checked.batch * P == slots.numel(),
          "tables must be contiguous, one row per layer of slot_to_expert ", shape_text(slots), ", got ",
          shape_text(tables));
  require_device(tables, "tables", slots, "slot_to_expert");
  const TablesProblem problem{static_cast<int>(num_ranks), static_cast<int>(num_experts),
                              static_cast<int>(P / num_ranks), data<int32_t>(slots)};
  const auto result = MutableReplicaTables::at(mutable_data<int32_t>(tables), num_experts, P);
  plan_layers<TablesPlanner>(slots, problem, result, checked.batch, 0,
                             [](const TablesProblem&, int64_t, int) {});
}

}  // namespace isoload::ops

ISOLOAD_OP(replica_tables)
