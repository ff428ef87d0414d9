// plan_replication: checks of the forecast, the placement and the rules.
#include "algorithms/plan_replication.h"

#include "ops/fill_batch.h"
#include "ops/op.h"
#include "ops/plan_layers.h"

namespace isoload::ops {

std::tuple<Tensor, Tensor> plan_replication(const Tensor& loads, const Tensor& slots, const Tensor& home,
                                            int64_t num_ranks, int64_t ranks_per_node, int64_t spare_slots,
                                            const std::optional<Tensor>& fixed,
                                            const std::optional<Tensor>& alive, int64_t local_slots,
                                            bool printed) {
  FillBatch batch(slots, home, num_ranks, ranks_per_node, spare_slots);
  batch.add_loads(loads, true);
  batch.add_fixed(fixed);
  batch.add_alive(alive);
  require(local_slots >= 0 && local_slots <= spare_slots, "local_slots must be in 0..", spare_slots, ", got ",
          local_slots);
  ReplicationProblem problem{};
  problem.local = static_cast<int>(local_slots);
  problem.printed = printed;
  for (int64_t b = 0; b < batch.layers() && slots.is_cpu(); ++b) {
    batch.set(problem.fill, b);
    FillBatch::check_placement(problem.fill, true);
  }
  batch.set(problem.fill, 0);
  const Tensor filled = batch.per_layer(batch.num_slots()), telemetry = batch.per_layer(5);
  const FillResult result{mutable_data<int32_t>(filled), mutable_data<int32_t>(telemetry)};
  plan_layers<ReplicationPlanner>(
      batch.slots(), problem, result, batch.layers(), 0,
      [](const ReplicationProblem& in, int64_t, int) { FillBatch::explain(in.fill); });
  return {filled, telemetry};
}

}  // namespace isoload::ops

ISOLOAD_OP(plan_replication)
