// plan_exact_share: a batch of layers in parallel, and one source rank's row of each.
#include "algorithms/plan_exact_share.h"

#include "ops/exact_batch.h"
#include "ops/op.h"
#include "ops/plan_layers.h"
#include "ops/row_gather.h"

namespace isoload::ops {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> plan_exact_share(
    const Tensor& loads, const Tensor& tables, int64_t num_ranks, int64_t num_slots,
    const std::optional<Tensor>& fixed, const std::optional<Tensor>& ticks, const std::optional<Tensor>& pour,
    int64_t objective, int64_t ranks_per_node, int64_t tolerance_ppm, int64_t sweeps, int64_t budget,
    int64_t rank) {
  const ExactBatch batch(loads, tables, num_ranks, num_slots, fixed, ticks, pour, objective, ranks_per_node,
                         tolerance_ppm, sweeps, budget);
  const LoadsBatch& in = batch.in;
  batch.require_per_source("");
  require(rank >= 0 && rank < in.R, "rank must be in 0..", in.R - 1, ", got ", rank);
  const Tensor row = in.per_layer(in.P);
  const ExactShareProblem problem{batch.problem, static_cast<int>(rank)};
  const ExactShareResult result{batch.result(), mutable_data<int32_t>(row)};
  plan_layers<ExactSharePlanner>(
      in.loads, problem, result, in.B, 8,
      [&](const ExactShareProblem& refused, int64_t b, int) { batch.explain(refused, b); });
  return {batch.quota, batch.peak, batch.bound, batch.telemetry, row};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> plan_exact_share_gathered(
    const Tensor& row, const std::vector<int64_t>& beside, const Tensor& boards, Tensor board, int64_t rank,
    int64_t timeout_ms, const Tensor& tables, int64_t num_slots, const std::optional<Tensor>& ticks,
    int64_t objective, int64_t ranks_per_node, int64_t tolerance_ppm, int64_t sweeps, int64_t budget) {
  const RowGathering gather(row, beside, boards, board, rank, timeout_ms);
  require(tables.dim() == 1, "tables must be those of one layer, got ", shape_text(tables));
  const ExactBatch batch(gather.rows, tables, gather.in.R, num_slots, std::nullopt, ticks, std::nullopt,
                         objective, ranks_per_node, tolerance_ppm, sweeps, budget);
  const Tensor share = batch.in.per_layer(batch.in.P);
  const ExactShareProblem problem{batch.problem, gather.in.rank};
  const ExactShareResult result{batch.result(), mutable_data<int32_t>(share)};
  if (!on_cuda(row, [&](auto stream) {
        const Scratch scratch(row, cuda::plan_bytes<ExactSharePlanner>(problem, 1));
        return cuda::plan_exact_share_gathered(gather.in, gather.out, problem, result, scratch.data(),
                                               stream);
      })) {
    gather.run();
    if (cpu::plan<ExactSharePlanner>(problem, result, 0) != kPlanned) batch.explain(problem, 0);
  }
  return {gather.rows, gather.beside, batch.quota, batch.peak, batch.bound, batch.telemetry, share};
}

}  // namespace isoload::ops

ISOLOAD_OP(plan_exact_share)
ISOLOAD_OP(plan_exact_share_gathered)
