// plan_active: checks of loads.
#include "algorithms/plan_active.h"

#include "ops/loads_batch.h"
#include "ops/op.h"

namespace isoload::ops {

std::tuple<Tensor, Tensor, Tensor, Tensor> plan_active(const Tensor& loads, const Tensor& tables,
                                                       int64_t num_ranks, int64_t num_slots) {
  const LoadsBatch batch(loads, tables, num_ranks, num_slots);
  const Tensor quota = batch.per_layer({batch.P}), telemetry = batch.per_layer({4});
  const Tensor peak = batch.per_layer({}, ScalarType::Long), bound = batch.per_layer({}, ScalarType::Long);
  const auto problem = batch.problem<ActiveProblem>();
  const ActiveResult result{mutable_data<int32_t>(quota), mutable_data<int64_t>(peak),
                            mutable_data<int64_t>(bound), mutable_data<int32_t>(telemetry)};
  plan_layers<ActivePlanner>(batch.like, problem, result, batch.B, 0,
                             [&](const ActiveProblem&, int64_t b, int) { batch.explain(b); });
  return {quota, peak, bound, telemetry};
}

}  // namespace isoload::ops

ISOLOAD_OP(plan_active)
