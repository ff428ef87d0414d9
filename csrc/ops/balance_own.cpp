// balance_own: checks of ids and of what ranks carry besides.
#include "cpu/balance_own.h"

#include "ops/op.h"
#include "ops/own_batch.h"
#include "ops/route_checks.h"

namespace isoload::ops {

std::tuple<Tensor, Tensor> balance_own(const Tensor& topk_ids, const Tensor& tables, int64_t num_experts,
                                       int64_t num_ranks, int64_t num_slots, const Tensor& offset,
                                       const Maybe& ticks, const Maybe& recent, const Maybe& sent,
                                       int64_t source, int64_t layer, int64_t sweeps) {
  require_copies(topk_ids);
  require(num_experts >= 1, "num_experts must be at least 1, got ", num_experts);
  require(tables.dim() == 1, "tables must be of one layer, got ", shape_text(tables));
  const Tensor ids = dense(topk_ids), counts = new_tensor(ids, {num_experts});
  const OwnBatch batch(counts, tables, num_ranks, num_slots, offset, std::nullopt, ticks, recent, sent,
                       source, layer, sweeps);
  const OwnProblem& problem = batch.own;
  const int64_t n = ids.numel();
  require(n <= most_own(problem.R), "topk_ids must have at most ", most_own(problem.R), " entries on ",
          num_ranks, " ranks, got ", n);
  const int64_t T = ids.size(0);
  const int K = static_cast<int>(ids.size(1));
  Tensor slots = new_tensor(ids, {ids.size(0), ids.size(1)}, ids.scalar_type());
  int32_t* const to = mutable_data<int32_t>(counts);
  if (!on_cuda(ids, [&](auto stream) {
        const Scratch scratch(ids, cuda::balance_own_bytes(T, K, problem));
        return with_ids(ids, slots, [&](auto* from, auto* slot) {
          return cuda::balance_own(from, T, K, problem, to, slot, scratch.data(), stream);
        });
      })) {
    const cpu::BalanceFault fault = with_ids(
        ids, slots, [&](auto* from, auto* slot) { return cpu::balance_own(from, n, problem, to, slot); });
    if (fault.kind == cpu::BalanceFault::not_planned) OwnBatch::explain_base(problem);
    check_balance(fault, problem, to);
  }
  return {slots, counts};
}

}  // namespace isoload::ops

ISOLOAD_OP(balance_own)
