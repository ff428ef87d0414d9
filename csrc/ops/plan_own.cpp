// plan_own: a batch of layers.
#include "algorithms/plan_own.h"

#include "ops/op.h"
#include "ops/own_batch.h"

namespace isoload::ops {
namespace {

// Raises what the planner refused.
void explain(const OwnProblem& in) {
  int64_t copies = OwnBatch::explain_base(in);
  for (int e = 0; e < in.E; ++e) {
    const int32_t n = in.loads[e];
    require(n >= 0, "counts must not be negative, got ", n, " for expert ", e);
    require(n == 0 || in.tables.copies(e) > 0,
            "counts must be 0 for an expert without a replica, got copies for expert ", e);
    copies += n;
  }
  require(copies <= most_own(in.R), "counts and fixed must sum to at most ", most_own(in.R), " copies on ",
          in.R, " ranks, got ", copies);
}

}  // namespace

Tensor plan_own(const Tensor& counts, const Tensor& tables, int64_t num_ranks, int64_t num_slots,
                const Tensor& offset, const Maybe& fixed, const Maybe& ticks, const Maybe& recent,
                const Maybe& sent, int64_t source, int64_t layer, int64_t sweeps) {
  const OwnBatch batch(counts, tables, num_ranks, num_slots, offset, fixed, ticks, recent, sent, source,
                       layer, sweeps);
  const Tensor send = batch.per_layer({num_slots});
  plan_layers<OwnPlanner>(batch.like, batch.own, mutable_data<int32_t>(send), batch.B, 8,
                          [&](const OwnProblem& in, int64_t, int) { explain(in); });
  return send;
}

}  // namespace isoload::ops

ISOLOAD_OP(plan_own)
