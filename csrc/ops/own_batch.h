// One source rank's own counts, per layer: the inputs of plan_own and balance_own, checked.
#pragma once

#include "algorithms/plan_own.h"
#include "ops/op.h"
#include "ops/plan_layers.h"
#include "rank_set.h"

namespace isoload::ops {

// The counts and tables of one source rank's batch, and the problem of its first layer.
struct OwnBatch : Layers {
  OwnBatch(const Tensor& counts, const Tensor& tables_in, int64_t R, int64_t P)
      : Layers{dense(counts), "counts", tables_in.dim() == 2, 1} {
    require_dtype(counts, "counts", ScalarType::Int);
    require_in("num_ranks", R, 1, kMaxRanks);
    require(P >= R && P % R == 0, "num_slots must be a multiple of num_ranks=", R, ", got ", P);
    require(counts.dim() == 1 + batched, "counts must be [E] per layer, got ", shape_text(counts));
    tables.emplace(tables_in, P, counts.size(batched), R);
    B = tables->batch;
    require_device(tables_in, "tables", counts, "counts");
    require(!batched || counts.size(0) == B, "counts must have one entry per layer (", B, "), got ",
            shape_text(counts));
    problem.R = static_cast<int>(R), problem.S = static_cast<int>(P / R);
    problem.E = static_cast<int>(counts.size(batched));
    problem.tables = tables->layer(0);
    problem.counts = data<int32_t>(like);
  }

  // What it is to even out besides, where given.
  void set_base(const Tensor& offset, const Maybe& fixed, const Maybe& ticks) {
    kept_[0] = checked_per_layer(offset, "offset", {problem.R});
    kept_[1] = checked_per_layer(fixed, "fixed", {problem.R});
    kept_[2] = checked_ticks(ticks, problem.R, like, like_name);
    problem.offset = data<int32_t>(kept_[0]);
    problem.fixed = data<int32_t>(kept_[1]);
    problem.ticks = data<int32_t>(kept_[2]);
  }

  // What batches add to, in place, where given.
  void set_sums(const Maybe& recent, const Maybe& sent) {
    problem.recent = checked_sums(recent, "recent", like.numel(), like, like_name);
    problem.sent = checked_sums(sent, "sent", 3 * problem.R * B, like, like_name);
  }

  void set_place(int64_t source, int64_t layer, int64_t sweeps) {
    require_in("source", source, 0, problem.R - 1);
    problem.source = static_cast<int>(source);
    problem.layer = require_int("layer", layer);
    problem.sweeps = require_int("sweeps", sweeps);
  }

  // Raises what the planner refused of what ranks carry; how many copies that is.
  static int64_t explain_base(const OwnProblem& in) {
    for (int r = 0; r < in.R; ++r)
      require(in.offset[r] >= 0 && in.offset[r] <= 1 << kOffsetBits, "offset must be in 0..2^", kOffsetBits,
              ", got ", in.offset[r], " for rank ", r);
    return sum_fixed(in.fixed, in.R);
  }

  std::optional<Tables> tables;
  OwnProblem problem{};

 private:
  Maybe kept_[3];
};

}  // namespace isoload::ops
