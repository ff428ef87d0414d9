// share_alone: checks of counts and quota.
#include "cpu/cpu.h"
#include "ops/device.h"
#include "ops/ops.h"
#include "ops/tensors.h"

namespace isoload::ops {

Tensor share_alone(const Tensor& counts_in, const Tensor& quota_in, const Tensor& tables_in, int64_t source) {
  require_dtype(counts_in, "counts", ScalarType::Int);
  require_dtype(quota_in, "quota", ScalarType::Int);
  require(counts_in.dim() == 1 || counts_in.dim() == 2, "counts must be [E] or [L, E], got ",
          shape_text(counts_in));
  require(quota_in.dim() == counts_in.dim(), "quota must be [P] or [L, P] like counts, got ",
          shape_text(quota_in));
  require(source >= 0 && source < kMaxRanks, "source must be in 0..", kMaxRanks - 1, ", got ", source);
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
  Tensor out = batched ? new_empty(counts, {B, P}) : new_empty(counts, {P});
  int32_t* const rows = mutable_data<int32_t>(out);
  auto problem = [&](int64_t b) {
    return ShareAloneProblem{
        static_cast<int>(E),           static_cast<int>(P),          tables.layer(b),
        data<int32_t>(counts) + b * E, data<int32_t>(quota) + b * P, static_cast<int>(source)};
  };
  if (on_cuda(counts, [&](auto stream) { return cuda::share_alone(problem(0), rows, B, stream); }))
    return out;
  for (int64_t b = 0; b < B; ++b) {
    const int bad = cpu::share_alone(problem(b), rows + b * P);
    require(bad == -1, "counts must be part of the loads that quota was made from: those of expert ", bad,
            " are not");
  }
  return out;
}

}  // namespace isoload::ops
