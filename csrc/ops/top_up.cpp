// top_up: checks of the loads and the filled placement.
#include "algorithms/top_up.h"

#include "ops/fill_batch.h"
#include "ops/op.h"
#include "ops/plan_layers.h"

namespace isoload::ops {

std::tuple<Tensor, Tensor> top_up(const Tensor& loads, const Tensor& slots, const Tensor& home,
                                  int64_t num_ranks, int64_t ranks_per_node, int64_t spare_slots,
                                  const std::optional<Tensor>& fixed, const std::optional<Tensor>& alive) {
  FillBatch batch(slots, home, num_ranks, ranks_per_node, spare_slots);
  batch.add_loads(loads);
  batch.add_fixed(fixed);
  batch.add_alive(alive);
  FillProblem problem{};
  batch.set(problem, 0);
  for (int64_t b = 0; b < batch.layers() && slots.is_cpu(); ++b) {
    batch.set(problem, b);
    FillBatch::check_placement(problem, false);
  }
  batch.set(problem, 0);
  const Tensor filled = batch.per_layer(batch.num_slots()), telemetry = batch.per_layer(5);
  const FillResult result{mutable_data<int32_t>(filled), mutable_data<int32_t>(telemetry)};
  plan_layers<TopUpPlanner>(batch.slots(), problem, result, batch.layers(), 0,
                            [](const FillProblem& in, int64_t, int) { FillBatch::explain(in); });
  return {filled, telemetry};
}

}  // namespace isoload::ops

ISOLOAD_OP(top_up)
