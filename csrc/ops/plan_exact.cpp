// plan_exact: a batch of layers in parallel.
#include "algorithms/plan_exact.h"

#include "ops/exact_batch.h"
#include "ops/op.h"
#include "ops/plan_layers.h"

namespace isoload::ops {

std::tuple<Tensor, Tensor, Tensor, Tensor> plan_exact(
    const Tensor& loads, const Tensor& tables, int64_t num_ranks, int64_t num_slots,
    const std::optional<Tensor>& fixed, const std::optional<Tensor>& ticks, const std::optional<Tensor>& pour,
    int64_t objective, int64_t ranks_per_node, int64_t tolerance_ppm, int64_t sweeps, int64_t budget) {
  const ExactBatch batch(loads, tables, num_ranks, num_slots, fixed, ticks, pour, objective, ranks_per_node,
                         tolerance_ppm, sweeps, budget);
  plan_layers<ExactPlanner>(batch.in.loads, batch.problem, batch.result(), batch.in.B, 8,
                            [&](const ExactProblem& in, int64_t b, int) { batch.explain(in, b); });
  return {batch.quota, batch.peak, batch.bound, batch.telemetry};
}

}  // namespace isoload::ops

ISOLOAD_OP(plan_exact)
