// share_alone: checks of counts and quota.
#include "algorithms/share_alone.h"

#include "ops/op.h"
#include "ops/plan_layers.h"
#include "rank_set.h"

namespace isoload::ops {

Tensor share_alone(const Tensor& counts_in, const Tensor& quota_in, const Tensor& tables_in, int64_t source,
                   bool past, const Maybe& recent) {
  require_dtype(counts_in, "counts", ScalarType::Int);
  require_dtype(quota_in, "quota", ScalarType::Int);
  require(counts_in.dim() == 1 || counts_in.dim() == 2, "counts must be [E] or [L, E], got ",
          shape_text(counts_in));
  require(quota_in.dim() == counts_in.dim(), "quota must be [P] or [L, P] like counts, got ",
          shape_text(quota_in));
  require_in("source", source, 0, kMaxRanks - 1);
  const Tensor counts = dense(counts_in), quota = dense(quota_in);
  const bool batched = counts.dim() == 2;
  const int64_t E = counts.size(batched), P = quota.size(batched);
  const Tables tables(tables_in, P, E);
  require(tables_in.dim() == counts.dim(), "tables must be of one layer, or of as many as counts, got ",
          shape_text(tables_in));
  const int64_t B = tables.batch;
  require(!batched || (counts.size(0) == B && quota.size(0) == B),
          "counts and quota must have one entry per layer (", B, "), got ", shape_text(counts), " and ",
          shape_text(quota));
  require_device(quota, "quota", counts, "counts");
  require_device(tables_in, "tables", counts, "counts");
  const Tensor out = batched ? new_tensor(counts, {B, P}) : new_tensor(counts, {P});
  const ShareAloneProblem problem{static_cast<int>(E),
                                  static_cast<int>(P),
                                  tables.layer(0),
                                  data<int32_t>(counts),
                                  data<int32_t>(quota),
                                  static_cast<int>(source),
                                  past,
                                  checked_sums(recent, "recent", counts.numel(), counts, "counts")};
  plan_layers<ShareAlonePlanner>(
      counts, problem, mutable_data<int32_t>(out), B, 0,
      [](const ShareAloneProblem& in, int64_t, int expert) {
        require(
            !in.past,
            "counts and past quotas must not be negative, quotas sum to less than 2^31 copies, and counts be "
            "0 for an expert without a replica: those of expert ",
            expert, " are not");
        require(false, "counts must be part of the loads that quota was made from: those of expert ", expert,
                " are not");
      });
  return out;
}

}  // namespace isoload::ops

ISOLOAD_OP(share_alone)
