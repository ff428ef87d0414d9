// share and share_by_rank: checks of loads and quota.
#include "cpu/cpu.h"
#include "ops/op.h"

namespace isoload::ops {

namespace {

// A batch of layers whose quotas are to be shared out: the inputs, checked.
class ShareBatch {
 public:
  ShareBatch(const Tensor& loads, const Tensor& quota, const Tensor& tables, int64_t ranks_per_node,
             bool locality)
      : locality_(locality), per_node_(ranks_per_node) {
    require_dtype(loads, "loads", ScalarType::Int);
    require_dtype(quota, "quota", ScalarType::Int);
    require(loads.dim() == 2 || loads.dim() == 3, "loads must be [R, E] or [L, R, E], got ",
            shape_text(loads));
    require(quota.dim() == loads.dim() - 1, "quota must be [P] or [L, P] like loads, got ",
            shape_text(quota));
    loads_ = dense(loads), quota_ = dense(quota);
    R = loads.size(loads.dim() - 2), E_ = loads.size(loads.dim() - 1), P = quota.size(quota.dim() - 1);
    require(R >= 1 && R <= kMaxRanks, "loads must be of 1..", kMaxRanks, " source ranks, got ", R);
    require(P >= R && P % R == 0, "quota must have a multiple of ", R, " slots, got ", P);
    tables_.emplace(tables, P, E_, R);
    require(tables.dim() == quota.dim(), "tables must be of one layer, or of as many as loads, got ",
            shape_text(tables));
    require_device(quota, "quota", loads, "loads");
    require_device(tables, "tables", loads, "loads");
    batched_ = loads.dim() == 3;
    require(ranks_per_node >= 1 && R % ranks_per_node == 0, "ranks_per_node must divide ", R, ", got ",
            ranks_per_node);
    require(!batched_ || (loads.size(0) == tables_->batch && quota.size(0) == tables_->batch),
            "loads and quota must have one entry per layer (", tables_->batch, "), got ", shape_text(loads),
            " and ", shape_text(quota));
  }

  Tensor solve(cpu::ShareOf of, int64_t rank, int64_t width) const {
    const bool one = of == cpu::ShareOf::one_row;
    const int64_t B = tables_->batch, size = (one ? 1 : R) * width;
    Tensor out = batched_ ? (one ? new_empty(loads_, {B, width}) : new_empty(loads_, {B, R, width}))
                          : (one ? new_empty(loads_, {width}) : new_empty(loads_, {R, width}));
    int32_t* const rows = mutable_data<int32_t>(out);
    if (on_cuda(loads_, [&](auto stream) {
          const Scratch scratch(loads_, cuda::share_bytes(problem(0), of, B));
          return cuda::share(problem(0), of, static_cast<int>(rank), nullptr, rows, B, scratch.data(),
                             stream);
        }))
      return out;
    for (int64_t b = 0; b < B; ++b) {
      const int bad = cpu::share(problem(b), of, static_cast<int>(rank), rows + b * size);
      require(bad == -1, "quota must conserve loads: that of expert ", bad, " was not made from these loads");
    }
    return out;
  }

  int64_t R, P;

 private:
  ShareProblem problem(int64_t b) const {
    ShareProblem problem{};
    problem.R = static_cast<int>(R);
    problem.E = static_cast<int>(E_);
    problem.S = static_cast<int>(P / R);
    problem.per_node = static_cast<int>(locality_ ? per_node_ : R);
    problem.locality = locality_;
    problem.tables = tables_->layer(b);
    problem.loads = data<int32_t>(loads_) + b * R * E_;
    problem.quota = data<int32_t>(quota_) + b * P;
    return problem;
  }

  Tensor loads_, quota_;
  bool locality_, batched_ = false;
  int64_t E_ = 0, per_node_;
  std::optional<Tables> tables_;
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
