// balance_same: checks of ids.
#include "cpu/balance_same.h"

#include "ops/exact_batch.h"
#include "ops/op.h"
#include "ops/route_checks.h"

namespace isoload::ops {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> balance_same(
    const Tensor& topk_ids, const Tensor& tables, int64_t num_experts, int64_t num_ranks, int64_t num_slots,
    const Maybe& ticks, int64_t objective, int64_t ranks_per_node, int64_t tolerance_ppm, int64_t sweeps,
    int64_t budget) {
  require_copies(topk_ids);
  require(num_experts >= 1, "num_experts must be at least 1, got ", num_experts);
  require_in("num_ranks", num_ranks, 1, kMaxRanks);
  require(tables.dim() == 1, "tables must be of one layer, got ", shape_text(tables));
  const Tensor ids = dense(topk_ids), loads = new_tensor(ids, {num_ranks, num_experts});
  ExactBatch batch(loads, tables, num_ranks, num_slots, std::nullopt, ticks, std::nullopt, objective,
                   ranks_per_node, tolerance_ppm, sweeps, budget);
  ExactProblem problem = batch.problem;
  if (problem.objective != Objective::local) problem.num_sources = 1;  // the others have no copies
  const int64_t T = ids.size(0);
  const int K = static_cast<int>(ids.size(1));
  Tensor slots = new_tensor(ids, {ids.size(0), ids.size(1)}, ids.scalar_type());
  int32_t* const to = mutable_data<int32_t>(loads);
  if (!on_cuda(ids, [&](auto stream) {
        const Scratch scratch(ids, cuda::balance_same_bytes(T, K, problem));
        return with_ids(ids, slots, [&](auto* from, auto* slot) {
          return cuda::balance_same(from, T, K, problem, to, batch.result(), slot, scratch.data(), stream);
        });
      })) {
    const cpu::BalanceFault fault = with_ids(ids, slots, [&](auto* from, auto* slot) {
      return cpu::balance_same(from, ids.numel(), problem, to, batch.result(), slot);
    });
    check_balance(fault, problem, to);
  }
  return {slots, loads, batch.quota, batch.peak, batch.bound, batch.telemetry};
}

}  // namespace isoload::ops

ISOLOAD_OP(balance_same)
