// One source rank's own counts, per layer: the inputs of plan_own and balance_own, checked.
#pragma once

#include "algorithms/plan_own.h"
#include "ops/loads_batch.h"
#include "ops/op.h"

namespace isoload::ops {

struct OwnBatch : LoadsBatch {
  OwnBatch(const Tensor& counts, const Tensor& tables, int64_t num_ranks, int64_t num_slots,
           const Tensor& offset_in, const Maybe& fixed_in, const Maybe& ticks_in, const Maybe& recent,
           const Maybe& sent, int64_t source, int64_t layer, int64_t sweeps)
      : LoadsBatch(counts, tables, num_ranks, num_slots, 0, "counts", false),
        offset(checked_per_layer(offset_in, "offset", {R})),
        fixed(checked_per_layer(fixed_in, "fixed", {R})),
        ticks(checked_ticks(ticks_in, R, like, like_name)),
        own(problem<OwnProblem>()) {
    own.offset = data<int32_t>(offset);
    own.fixed = data<int32_t>(fixed);
    own.ticks = data<int32_t>(ticks);
    own.recent = checked_sums(recent, "recent", like.numel(), like, like_name);
    own.sent = checked_sums(sent, "sent", 3 * R * B, like, like_name);
    require_in("source", source, 0, R - 1);
    own.source = static_cast<int>(source);
    own.layer = require_int("layer", layer);
    own.sweeps = require_int("sweeps", sweeps);
  }

  // Raises what the planner refused of what ranks carry; how many copies that is.
  static int64_t explain_base(const OwnProblem& in) {
    for (int r = 0; r < in.R; ++r)
      require(in.offset[r] >= 0 && in.offset[r] <= 1 << kOffsetBits, "offset must be in 0..2^", kOffsetBits,
              ", got ", in.offset[r], " for rank ", r);
    return sum_fixed(in.fixed, in.R);
  }

  Tensor offset;
  Maybe fixed, ticks;
  OwnProblem own;  // of layer 0
};

}  // namespace isoload::ops
