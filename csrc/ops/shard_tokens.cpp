// shard_tokens: checks of the loads, the filled slots and the rules.
#include "algorithms/shard_tokens.h"

#include "ops/loads_batch.h"
#include "ops/op.h"

namespace isoload::ops {

namespace {

void explain_layer(const LoadsBatch& batch, const ShardingProblem& in, int64_t b) {
  batch.explain(b, sum_fixed(in.fixed, in.R), "loads and fixed");
  for (int e = 0; e < in.E; ++e) {
    bool held = false;
    for (int j = in.tables.offsets[e]; j < in.tables.offsets[e + 1]; ++j)
      held |= in.home_slot[e] / in.S == in.tables.ranks[j] && in.home_slot[e] >= 0;
    require(held, "home_slot must be on a rank that holds its expert, got slot ", in.home_slot[e],
            " for expert ", e);
  }
}

}  // namespace

Tensor shard_tokens(const Tensor& loads, const Tensor& tables, const Tensor& home, int64_t num_ranks,
                    int64_t num_slots, const Maybe& fixed_in, const Maybe& alive_in, int64_t tolerance_ppm,
                    bool printed) {
  const LoadsBatch batch(loads, tables, num_ranks, num_slots);
  require(loads.dim() == 2 + batch.batched, "loads must be per source rank, [", num_ranks,
          ", E] per layer, got ", shape_text(loads));
  const Tensor homes = batch.checked_per_layer(home, "home_slot", {batch.E});
  const auto fixed = batch.checked_per_layer(fixed_in, "fixed", {batch.R});
  const auto alive = checked_alive(alive_in, batch.R, loads, "loads");
  require(tolerance_ppm >= 0 && tolerance_ppm <= 1000000000, "tolerance_ppm must be in 0..10^9, got ",
          tolerance_ppm);
  const Tensor quota = batch.per_layer({batch.P});
  auto problem = batch.problem<ShardingProblem>();
  problem.fixed = data<int32_t>(fixed);
  problem.home_slot = data<int32_t>(homes);
  problem.alive = data<bool>(alive);
  problem.tolerance_ppm = tolerance_ppm;
  problem.printed = printed;
  plan_layers<ShardingPlanner>(
      batch.like, problem, mutable_data<int32_t>(quota), batch.B, 0,
      [&](const ShardingProblem& in, int64_t b, int) { explain_layer(batch, in, b); });
  return quota;
}

}  // namespace isoload::ops

ISOLOAD_OP(shard_tokens)
