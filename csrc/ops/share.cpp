// share and share_by_rank: checks of loads and quota.
#include "algorithms/share.h"

#include "ops/op.h"
#include "ops/plan_layers.h"

namespace isoload::ops {

namespace {

// A batch of layers whose quotas are to be shared out: the inputs, checked.
struct ShareBatch : Layers {
  ShareBatch(const Tensor& loads, const Tensor& quota, const Tensor& tables, int64_t ranks_per_node,
             bool locality)
      : Layers{dense(loads), "loads", loads.dim() == 3, 1}, quota_(dense(quota)) {
    require_dtype(loads, "loads", ScalarType::Int);
    require_dtype(quota, "quota", ScalarType::Int);
    require(loads.dim() == 2 || loads.dim() == 3, "loads must be [R, E] or [L, R, E], got ",
            shape_text(loads));
    require(quota.dim() == loads.dim() - 1, "quota must be [P] or [L, P] like loads, got ",
            shape_text(quota));
    const int64_t E = loads.size(loads.dim() - 1);
    R = loads.size(loads.dim() - 2), P = quota.size(quota.dim() - 1);
    require(R >= 1 && R <= kMaxRanks, "loads must be of 1..", kMaxRanks, " source ranks, got ", R);
    require(P >= R && P % R == 0, "quota must have a multiple of ", R, " slots, got ", P);
    tables_.emplace(tables, P, E, R);
    B = tables_->batch;
    require(tables.dim() == quota.dim(), "tables must be of one layer, or of as many as loads, got ",
            shape_text(tables));
    require_device(quota, "quota", loads, "loads");
    require_device(tables, "tables", loads, "loads");
    require_per_node(ranks_per_node, R);
    require(!batched || (loads.size(0) == B && quota.size(0) == B),
            "loads and quota must have one entry per layer (", B, "), got ", shape_text(loads), " and ",
            shape_text(quota));
    first_.R = static_cast<int>(R);
    first_.E = static_cast<int>(E);
    first_.S = static_cast<int>(P / R);
    first_.per_node = static_cast<int>(locality ? ranks_per_node : R);
    first_.locality = locality;
    first_.tables = tables_->layer(0);
    first_.loads = data<int32_t>(like);
    first_.quota = data<int32_t>(quota_);
  }

  Tensor solve(ShareOf of, int64_t rank, const Sizes& size) const {
    const Tensor out = per_layer(size);
    ShareProblem problem = first_;
    problem.of = of, problem.rank = static_cast<int>(rank);
    plan_layers<SharePlanner>(
        like, problem, mutable_data<int32_t>(out), B, 0, [](const ShareProblem&, int64_t, int bad) {
          require(false, "quota must conserve loads: that of expert ", bad, " was not made from these loads");
        });
    return out;
  }

  int64_t R, P;

 private:
  Tensor quota_;
  std::optional<Tables> tables_;
  ShareProblem first_{};  // of layer 0
};

}  // namespace

Tensor share(const Tensor& loads, const Tensor& quota, const Tensor& tables, int64_t ranks_per_node,
             int64_t rank, bool locality) {
  const ShareBatch batch(loads, quota, tables, ranks_per_node, locality);
  require(rank >= -1 && rank < batch.R, "rank must be in 0..", batch.R - 1, ", got ", rank);
  return rank < 0 ? batch.solve(ShareOf::all_rows, 0, {batch.R, batch.P})
                  : batch.solve(ShareOf::one_row, rank, {batch.P});
}

Tensor share_by_rank(const Tensor& loads, const Tensor& quota, const Tensor& tables, int64_t ranks_per_node,
                     bool locality) {
  const ShareBatch batch(loads, quota, tables, ranks_per_node, locality);
  return batch.solve(ShareOf::all_ranks, 0, {batch.R, batch.R});
}

}  // namespace isoload::ops

ISOLOAD_OP(share)
ISOLOAD_OP(share_by_rank)
