// plan_exact: a batch of layers in parallel, and one source rank's send_counts of each, if a rank is given.
#include "algorithms/plan_exact_share.h"
#include "ops/exact_batch.h"
#include "ops/op.h"

namespace isoload::ops {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> plan_exact(
    const Tensor& loads, const Tensor& tables, int64_t num_ranks, int64_t num_slots, const Maybe& fixed,
    const Maybe& ticks, const Maybe& pour, int64_t objective, int64_t ranks_per_node, int64_t tolerance_ppm,
    int64_t sweeps, int64_t budget, std::optional<int64_t> rank) {
  const ExactBatch batch(loads, tables, num_ranks, num_slots, fixed, ticks, pour, objective, ranks_per_node,
                         tolerance_ppm, sweeps, budget);
  const LoadsBatch& in = batch.in;
  auto explain = [&](const ExactProblem& refused, int64_t b, int) { batch.explain(refused, b); };
  const Tensor send_counts = in.per_layer({rank ? in.P : 0});
  if (rank) {
    batch.require_per_source(", for send_counts");
    require_in("rank", *rank, 0, in.R - 1);
    const ExactShareProblem problem{batch.problem, static_cast<int>(*rank)};
    const ExactShareResult result{batch.result(), mutable_data<int32_t>(send_counts)};
    plan_layers<ExactSharePlanner>(in.like, problem, result, in.B, 8, explain);
  } else {
    plan_layers<ExactPlanner>(in.like, batch.problem, batch.result(), in.B, 8, explain);
  }
  return {batch.quota, batch.peak, batch.bound, batch.telemetry, send_counts};
}

}  // namespace isoload::ops

ISOLOAD_OP(plan_exact)
