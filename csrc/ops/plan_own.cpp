// plan_own: checks of counts, offset and what ranks carry besides.
#include "algorithms/plan_own.h"

#include "ops/op.h"
#include "ops/plan_layers.h"
#include "rank_set.h"

namespace isoload::ops {
namespace {

// The counts and tables of one source rank's batch, checked, and the problem of its first layer.
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

  // A vector over ranks, per layer or one for all.
  const int32_t* of_ranks(const Tensor& given, const char* name, bool per_layer, Tensor& kept) const {
    require_dtype(given, name, ScalarType::Int);
    per_layer&& batched ? require_shape(given, name, {tables->batch, problem.R})
                        : require_shape(given, name, {problem.R});
    require_device(given, name, counts, "counts");
    kept = dense(given);
    return data<int32_t>(kept);
  }

  // Raises what the planner refused in layer b.
  void explain(const OwnProblem& in, int64_t b) const {
    int64_t copies = 0;
    for (int r = 0; r < in.R; ++r) {
      require(in.offset[r] >= 0 && in.offset[r] <= 1 << kOffsetBits, "offset must be in 0..2^", kOffsetBits,
              ", got ", in.offset[r], " for rank ", r);
      if (!in.fixed) continue;
      require(in.fixed[r] >= 0, "fixed must not be negative, got ", in.fixed[r], " for rank ", r);
      copies += in.fixed[r];
    }
    for (int e = 0; e < in.E; ++e) {
      const int32_t n = in.counts[e];
      require(n >= 0, "counts must not be negative, got ", n, " for expert ", e);
      require(n == 0 || in.tables.copies(e) > 0,
              "counts must be 0 for an expert without a replica, got copies for expert ", e);
      copies += n;
    }
    require(copies < kMostOwn, "counts and fixed must sum to less than 2^29 copies, got ", copies);
  }

  Tensor counts;
  bool batched;
  std::optional<Tables> tables;
  OwnProblem problem{};
};

}  // namespace

Tensor plan_own(const Tensor& counts, const Tensor& tables, int64_t num_ranks, int64_t num_slots,
                const Tensor& offset, const std::optional<Tensor>& fixed, const std::optional<Tensor>& ticks,
                const std::optional<Tensor>& recent, int64_t source, int64_t layer, int64_t sweeps) {
  OwnBatch batch(counts, tables, num_ranks, num_slots);
  OwnProblem& problem = batch.problem;
  Tensor kept[3] = {offset, offset, offset};
  problem.offset = batch.of_ranks(offset, "offset", true, kept[0]);
  if (fixed) problem.fixed = batch.of_ranks(*fixed, "fixed", true, kept[1]);
  if (ticks) problem.ticks = batch.of_ranks(*ticks, "ticks", false, kept[2]);
  for (int64_t r = 0; ticks && r < num_ranks && batch.counts.is_cpu(); ++r)
    require(problem.ticks[r] >= 1 && problem.ticks[r] <= 1 << 20, "ticks must be in 1..2^20, got ",
            problem.ticks[r], " for rank ", r);
  if (recent) {
    require_dtype(*recent, "recent", ScalarType::Long);
    require(recent->is_contiguous() && recent->numel() == batch.counts.numel(),
            "recent must be contiguous with ", batch.counts.numel(), " numbers, as counts, got ",
            shape_text(*recent));
    require_device(*recent, "recent", counts, "counts");
    problem.recent = mutable_data<int64_t>(*recent);
  }
  require(source >= 0 && source < num_ranks, "source must be in 0..", num_ranks - 1, ", got ", source);
  require(layer >= 0 && layer <= INT32_MAX, "layer must be in 0..2^31-1, got ", layer);
  require(sweeps >= 0 && sweeps <= INT32_MAX, "sweeps must be in 0..2^31-1, got ", sweeps);
  problem.source = static_cast<int>(source), problem.layer = static_cast<int>(layer);
  problem.sweeps = static_cast<int>(sweeps);
  const int64_t B = batch.tables->batch;
  const Tensor send = batch.batched ? new_empty(counts, {B, num_slots}) : new_empty(counts, {num_slots});
  plan_layers<OwnPlanner>(batch.counts, problem, mutable_data<int32_t>(send), B, 8,
                          [&](const OwnProblem& in, int64_t b, int) { batch.explain(in, b); });
  return send;
}

}  // namespace isoload::ops

ISOLOAD_OP(plan_own)
