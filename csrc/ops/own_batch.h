// One source rank's own counts, per layer: the inputs of plan_own and balance_own, checked.
#pragma once

#include <optional>

#include "algorithms/plan_own.h"
#include "ops/op.h"
#include "rank_set.h"

namespace isoload::ops {

// The counts and tables of one source rank's batch, and the problem of its first layer.
struct OwnBatch {
  OwnBatch(const Tensor& counts_in, const Tensor& tables_in, int64_t R, int64_t P)
      : counts(dense(counts_in)), batched(tables_in.dim() == 2) {
    require_dtype(counts_in, "counts", ScalarType::Int);
    require(R >= 1 && R <= kMaxRanks, "num_ranks must be in 1..", kMaxRanks, ", got ", R);
    require(P >= R && P % R == 0, "num_slots must be a multiple of num_ranks=", R, ", got ", P);
    require(counts.dim() == 1 + batched, "counts must be [E] per layer, got ", shape_text(counts));
    tables.emplace(tables_in, P, counts.size(batched), R);
    require_device(tables_in, "tables", counts_in, "counts");
    require(!batched || counts.size(0) == tables->batch, "counts must have one entry per layer (",
            tables->batch, "), got ", shape_text(counts));
    problem.R = static_cast<int>(R), problem.S = static_cast<int>(P / R);
    problem.E = static_cast<int>(counts.size(batched));
    problem.tables = tables->layer(0);
    problem.counts = data<int32_t>(counts);
  }

  // What it is to even out besides: fixed and ticks where given.
  void set_base(const Tensor& offset, const std::optional<Tensor>& fixed,
                const std::optional<Tensor>& ticks) {
    problem.offset = of_ranks(offset, "offset", true, kept_[0]);
    if (fixed) problem.fixed = of_ranks(*fixed, "fixed", true, kept_[1]);
    if (ticks) problem.ticks = of_ranks(*ticks, "ticks", false, kept_[2]);
    for (int r = 0; ticks && r < problem.R && counts.is_cpu(); ++r)
      require(problem.ticks[r] >= 1 && problem.ticks[r] <= 1 << 20, "ticks must be in 1..2^20, got ",
              problem.ticks[r], " for rank ", r);
  }

  // What batches add to, in place, where given.
  void set_sums(const std::optional<Tensor>& recent, const std::optional<Tensor>& sent) {
    if (recent) problem.recent = sums(*recent, "recent", counts.numel());
    if (sent) problem.sent = sums(*sent, "sent", 3 * problem.R * tables->batch);
  }

  void set_place(int64_t source, int64_t layer, int64_t sweeps) {
    require(source >= 0 && source < problem.R, "source must be in 0..", problem.R - 1, ", got ", source);
    require(layer >= 0 && layer <= INT32_MAX, "layer must be in 0..2^31-1, got ", layer);
    require(sweeps >= 0 && sweeps <= INT32_MAX, "sweeps must be in 0..2^31-1, got ", sweeps);
    problem.source = static_cast<int>(source), problem.layer = static_cast<int>(layer);
    problem.sweeps = static_cast<int>(sweeps);
  }

  // Raises what the planner refused of what ranks carry; how many copies that is.
  static int64_t explain_base(const OwnProblem& in) {
    int64_t copies = 0;
    for (int r = 0; r < in.R; ++r) {
      require(in.offset[r] >= 0 && in.offset[r] <= 1 << kOffsetBits, "offset must be in 0..2^", kOffsetBits,
              ", got ", in.offset[r], " for rank ", r);
      if (!in.fixed) continue;
      require(in.fixed[r] >= 0, "fixed must not be negative, got ", in.fixed[r], " for rank ", r);
      copies += in.fixed[r];
    }
    return copies;
  }

  Tensor counts;
  bool batched;
  std::optional<Tables> tables;
  OwnProblem problem{};

 private:
  // A vector over ranks, per layer or one for all.
  const int32_t* of_ranks(const Tensor& given, const char* name, bool per_layer,
                          std::optional<Tensor>& kept) const {
    require_dtype(given, name, ScalarType::Int);
    per_layer&& batched ? require_shape(given, name, {tables->batch, problem.R})
                        : require_shape(given, name, {problem.R});
    require_device(given, name, counts, "counts");
    kept.emplace(dense(given));
    return data<int32_t>(*kept);
  }

  int64_t* sums(const Tensor& given, const char* name, int64_t size) const {
    require_dtype(given, name, ScalarType::Long);
    require(given.is_contiguous() && given.numel() == size, name, " must be contiguous with ", size,
            " numbers, got ", shape_text(given));
    require_device(given, name, counts, "counts");
    return mutable_data<int64_t>(given);
  }

  std::optional<Tensor> kept_[3];
};

}  // namespace isoload::ops
