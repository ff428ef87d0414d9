// plan_joint: a batch of layers in parallel, and one source rank's send_counts of each.
#include "algorithms/plan_joint.h"

#include "ops/exact_batch.h"
#include "ops/op.h"

namespace isoload::ops {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> plan_joint(
    const Tensor& loads, const Tensor& tables, int64_t num_ranks, int64_t num_slots, int64_t num_shared,
    int64_t first_shared, const Maybe& ticks, int64_t objective, int64_t ranks_per_node,
    int64_t tolerance_ppm, int64_t sweeps, int64_t budget, int64_t rank) {
  require_in("num_shared", num_shared, 1, 1024);
  const ExactBatch batch(loads, tables, num_ranks, num_slots, std::nullopt, ticks, std::nullopt, objective,
                         ranks_per_node, tolerance_ppm, sweeps, budget, num_shared);
  const LoadsBatch& in = batch.in;
  batch.require_per_source("");
  const int64_t most = in.P / in.R - num_shared;
  require(first_shared >= 0 && first_shared <= most, "first_shared must be in 0..", most,
          " with num_shared=", num_shared, ", got ", first_shared);
  require_in("rank", rank, 0, in.R - 1);
  const JointProblem problem{batch.problem, batch.problem.loads, static_cast<int>(num_shared),
                             static_cast<int>(first_shared), static_cast<int>(rank)};
  const Tensor send_counts = in.per_layer({in.P}), share = in.per_layer({in.R, in.R});
  const JointResult result{batch.result(), mutable_data<int32_t>(send_counts), mutable_data<int32_t>(share)};
  plan_layers<JointPlanner>(in.like, problem, result, in.B, 8, [&](const JointProblem&, int64_t b, int) {
    int64_t copies = 0;
    for (int64_t s = 0; s < in.R; ++s) {
      const int64_t tokens = in.of(b)[s * in.width + in.E];
      require(tokens >= 0, "loads must not be negative, got ", tokens, " for expert ", in.E);
      copies += num_shared * tokens;
    }
    in.explain(b, copies);
  });
  return {batch.quota, batch.peak, batch.bound, batch.telemetry, send_counts, share};
}

}  // namespace isoload::ops

ISOLOAD_OP(plan_joint)
