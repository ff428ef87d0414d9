// share: checks of loads and quota.
#include "cpu/cpu.h"
#include "ops/ops.h"
#include "ops/tensors.h"

namespace isoload::ops {

Tensor share(const Tensor& loads_in, const Tensor& quota_in, const Tensor& tables_in, int64_t ranks_per_node,
             int64_t rank, bool locality) {
  require_dtype(loads_in, "loads", ScalarType::Int);
  require_dtype(quota_in, "quota", ScalarType::Int);
  require(loads_in.dim() == 2 || loads_in.dim() == 3, "loads must be [R, E] or [L, R, E], got ",
          shape_text(loads_in));
  require(quota_in.dim() == loads_in.dim() - 1, "quota must be [P] or [L, P] like loads, got ",
          shape_text(quota_in));
  const Tensor loads = dense(loads_in), quota = dense(quota_in);
  const int64_t R = loads.size(loads.dim() - 2), E = loads.size(loads.dim() - 1),
                P = quota.size(quota.dim() - 1);
  const Tables tables(tables_in, P, E);
  require(tables_in.dim() == quota.dim(), "tables must be of one layer, or of as many as loads, got ",
          shape_text(tables_in));
  const bool batched = loads.dim() == 3;
  const int64_t B = tables.batch;
  require(P % R == 0, "quota must have a multiple of ", R, " slots, got ", P);
  require(rank >= -1 && rank < R, "rank must be in 0..", R - 1, ", got ", rank);
  require(ranks_per_node >= 1 && R % ranks_per_node == 0, "ranks_per_node must divide ", R, ", got ",
          ranks_per_node);
  require(!batched || (loads.size(0) == B && quota.size(0) == B),
          "loads and quota must have one entry per layer (", B, "), got ", shape_text(loads), " and ",
          shape_text(quota));
  const int64_t first = rank < 0 ? 0 : rank, last = rank < 0 ? R : rank + 1;
  Tensor out = rank < 0 ? (batched ? new_empty(loads, {B, R, P}) : new_empty(loads, {R, P}))
                        : (batched ? new_empty(loads, {B, P}) : new_empty(loads, {P}));
  for (int64_t b = 0; b < B; ++b) {
    ShareProblem problem{};
    problem.R = static_cast<int>(R);
    problem.E = static_cast<int>(E);
    problem.S = static_cast<int>(P / R);
    problem.per_node = static_cast<int>(locality ? ranks_per_node : R);
    problem.locality = locality;
    problem.tables = tables.layer(b);
    problem.loads = data<int32_t>(loads) + b * R * E;
    problem.quota = data<int32_t>(quota) + b * P;
    problem.first_row = static_cast<int>(first);
    problem.last_row = static_cast<int>(last);
    const int bad = cpu::share(problem, mutable_data<int32_t>(out) + b * (last - first) * P);
    require(bad == -1, "quota must conserve loads: that of expert ", bad, " was not made from these loads");
  }
  return out;
}

}  // namespace isoload::ops
