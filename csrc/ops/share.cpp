// share and share_by_rank: checks of loads and quota.
#include "cpu/cpu.h"
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

  Tensor solve(cpu::ShareOf of, int64_t rank, int64_t width) const {
    const bool one = of == cpu::ShareOf::one_row;
    const int64_t size = (one ? 1 : R) * width;
    const Tensor out = per_layer(one ? Sizes{width} : Sizes{R, width});
    int32_t* const rows = mutable_data<int32_t>(out);
    if (on_cuda(like, [&](auto stream) {
          const Scratch scratch(like, cuda::share_bytes(first_, of, B));
          return cuda::share(first_, of, static_cast<int>(rank), nullptr, rows, B, scratch.data(), stream);
        }))
      return out;
    for (int64_t b = 0; b < B; ++b) {
      ShareProblem in = first_;
      in.tables = tables_->layer(b), in.loads += b * R * in.E, in.quota += b * P;
      const int bad = cpu::share(in, of, static_cast<int>(rank), rows + b * size);
      require(bad == -1, "quota must conserve loads: that of expert ", bad, " was not made from these loads");
    }
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
  return batch.solve(rank < 0 ? cpu::ShareOf::all_rows : cpu::ShareOf::one_row, rank, batch.P);
}

Tensor share_by_rank(const Tensor& loads, const Tensor& quota, const Tensor& tables, int64_t ranks_per_node,
                     bool locality) {
  const ShareBatch batch(loads, quota, tables, ranks_per_node, locality);
  return batch.solve(cpu::ShareOf::all_ranks, 0, batch.R);
}

}  // namespace isoload::ops

ISOLOAD_OP(share)
ISOLOAD_OP(share_by_rank)
