// plan_active: checks of loads and ticks.
#include "algorithms/plan_active.h"

#include "ops/loads_batch.h"
#include "ops/op.h"
#include "ops/plan_layers.h"

namespace isoload::ops {

std::tuple<Tensor, Tensor, Tensor, Tensor> plan_active(const Tensor& loads, const Tensor& tables,
                                                       int64_t num_ranks, int64_t num_slots,
                                                       const std::optional<Tensor>& ticks_in) {
  const LoadsBatch batch(loads, tables, num_ranks, num_slots);
  std::optional<Tensor> ticks;
  if (ticks_in) ticks = batch.checked_ticks(*ticks_in);
  const Tensor quota = batch.per_layer(batch.P), telemetry = batch.per_layer(4);
  const Tensor peak = batch.per_layer(ScalarType::Long), bound = batch.per_layer(ScalarType::Long);
  ActiveProblem problem{};
  problem.R = static_cast<int>(batch.R);
  problem.E = static_cast<int>(batch.E);
  problem.S = static_cast<int>(batch.P / batch.R);
  problem.tables = batch.tables->layer(0);
  problem.loads = batch.of(0);
  problem.num_sources = static_cast<int>(batch.sources);
  problem.ticks = ticks ? data<int32_t>(*ticks) : nullptr;
  const ActiveResult result{mutable_data<int32_t>(quota), mutable_data<int64_t>(peak),
                            mutable_data<int64_t>(bound), mutable_data<int32_t>(telemetry)};
  plan_layers<ActivePlanner>(batch.loads, problem, result, batch.B, 0,
                             [&](const ActiveProblem&, int64_t b, int) { batch.explain(b); });
  return {quota, peak, bound, telemetry};
}

}  // namespace isoload::ops

ISOLOAD_OP(plan_active)
