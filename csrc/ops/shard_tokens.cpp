// shard_tokens: checks of the loads, the filled slots and the rules.
#include "algorithms/shard_tokens.h"

#include "ops/loads_batch.h"
#include "ops/op.h"
#include "ops/plan_layers.h"

namespace isoload::ops {

namespace {

void explain_layer(const LoadsBatch& batch, const ShardingProblem& in, int64_t b) {
  int64_t besides = 0;
  for (int r = 0; in.fixed && r < in.R; ++r) {
    require(in.fixed[r] >= 0, "fixed must not be negative, got ", in.fixed[r], " for rank ", r);
    besides += in.fixed[r];
  }
  batch.explain(b, besides, "loads and fixed");
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
                    int64_t num_slots, const std::optional<Tensor>& fixed_in,
                    const std::optional<Tensor>& alive_in, int64_t tolerance_ppm, bool printed) {
  const LoadsBatch batch(loads, tables, num_ranks, num_slots);
  require(loads.dim() == 2 + batch.batched, "loads must be per source rank, [", num_ranks,
          ", E] per layer, got ", shape_text(loads));
  require_dtype(home, "home_slot", ScalarType::Int);
  batch.require_per_layer(home, "home_slot", batch.E);
  require_device(home, "home_slot", loads, "loads");
  const Tensor homes = dense(home);
  std::optional<Tensor> fixed, alive;
  if (fixed_in) {
    require_dtype(*fixed_in, "fixed", ScalarType::Int);
    batch.require_per_layer(*fixed_in, "fixed", batch.R);
    require_device(*fixed_in, "fixed", loads, "loads");
    fixed = dense(*fixed_in);
  }
  if (alive_in) alive = checked_alive(*alive_in, batch.R, loads, "loads");
  require(tolerance_ppm >= 0 && tolerance_ppm <= 1000000000, "tolerance_ppm must be in 0..10^9, got ",
          tolerance_ppm);
  const Tensor quota = batch.per_layer(batch.P);
  ShardingProblem problem{};
  problem.R = static_cast<int>(batch.R);
  problem.E = static_cast<int>(batch.E);
  problem.S = static_cast<int>(batch.P / batch.R);
  problem.tables = batch.tables->layer(0);
  problem.loads = batch.of(0);
  problem.fixed = fixed ? data<int32_t>(*fixed) : nullptr;
  problem.home_slot = data<int32_t>(homes);
  problem.alive = alive ? data<bool>(*alive) : nullptr;
  problem.tolerance_ppm = tolerance_ppm;
  problem.printed = printed;
  plan_layers<ShardingPlanner>(
      batch.loads, problem, mutable_data<int32_t>(quota), batch.B, 0,
      [&](const ShardingProblem& in, int64_t b, int) { explain_layer(batch, in, b); });
  return quota;
}

}  // namespace isoload::ops

ISOLOAD_OP(shard_tokens)
