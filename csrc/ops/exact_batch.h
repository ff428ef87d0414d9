// A batch of exact splits: the inputs of plan_exact and plan_joint, checked, and the results of both.
#pragma once

#include <optional>

#include "algorithms/plan_exact.h"
#include "ops/loads_batch.h"
#include "ops/op.h"

namespace isoload::ops {

class ExactBatch {
 public:
  ExactBatch(const Tensor& loads, const Tensor& tables, int64_t num_ranks, int64_t num_slots,
             const std::optional<Tensor>& fixed, const std::optional<Tensor>& ticks,
             const std::optional<Tensor>& pour, int64_t objective, int64_t ranks_per_node,
             int64_t tolerance_ppm, int64_t sweeps, int64_t budget, int64_t num_shared = 0)
      : in(loads, tables, num_ranks, num_slots, num_shared) {
    problem.R = static_cast<int>(in.R);
    problem.E = static_cast<int>(in.E);
    problem.S = static_cast<int>(in.P / in.R);
    problem.tables = in.tables->layer(0);
    problem.loads = in.of(0);
    problem.num_sources = static_cast<int>(in.sources);
    if (fixed) add_fixed(*fixed);
    if (ticks) add_ticks(*ticks);
    if (pour) add_pour(*pour);
    set_objective(objective, ranks_per_node);
    set_limits(tolerance_ppm, sweeps, budget);
    quota = in.per_layer(in.P), telemetry = in.per_layer(4);
    peak = in.per_layer(ScalarType::Long), bound = in.per_layer(ScalarType::Long);
  }

  void require_per_source(const char* what) const {
    require(in.loads.dim() == 2 + in.batched, "loads must be per source rank, [", in.R, ", ", in.E,
            "] per layer", what, ", got the sum ", shape_text(in.loads));
  }

  ExactResult result() const {
    return {mutable_data<int32_t>(quota), mutable_data<int64_t>(peak), mutable_data<int64_t>(bound),
            mutable_data<int32_t>(telemetry)};
  }

  // Raises what the solver refused in layer b.
  void explain(const ExactProblem& refused, int64_t b) const {
    int64_t besides = 0;
    for (int r = 0; refused.fixed && r < refused.R; ++r) {
      require(refused.fixed[r] >= 0, "fixed must not be negative, got ", refused.fixed[r], " for rank ", r);
      besides += refused.fixed[r];
    }
    if (refused.pour) {
      require(*refused.pour >= 0, "pour must not be negative, got ", *refused.pour);
      besides += *refused.pour;
    }
    in.explain(b, besides, "loads, fixed and pour");
  }

  LoadsBatch in;
  ExactProblem problem{};  // of layer 0
  Tensor quota, peak, bound, telemetry;

 private:
  void add_fixed(const Tensor& fixed) {
    require_dtype(fixed, "fixed", ScalarType::Int);
    in.require_per_layer(fixed, "fixed", in.R);
    require_device(fixed, "fixed", in.loads, "loads");
    fixed_ = dense(fixed);
    problem.fixed = data<int32_t>(*fixed_);
  }

  void add_ticks(const Tensor& ticks) {
    ticks_ = in.checked_ticks(ticks);
    problem.ticks = data<int32_t>(*ticks_);
  }

  void add_pour(const Tensor& pour) {
    require_dtype(pour, "pour", ScalarType::Int);
    in.batched ? require_shape(pour, "pour", {in.B}) : require_shape(pour, "pour", {});
    require_device(pour, "pour", in.loads, "loads");
    pour_ = dense(pour);
    problem.pour = data<int32_t>(*pour_);
  }

  void set_objective(int64_t objective, int64_t ranks_per_node) {
    require(objective >= 0 && objective <= 2, "objective must be 0 (spread), 1 (local) or 2 (packed), got ",
            objective);
    require(ranks_per_node >= 1 && in.R % ranks_per_node == 0, "ranks_per_node must divide ", in.R, ", got ",
            ranks_per_node);
    problem.objective = static_cast<Objective>(objective);
    if (problem.objective == Objective::local) require_per_source(", for objective local");
    problem.per_node = static_cast<int>(ranks_per_node);
  }

  void set_limits(int64_t tolerance_ppm, int64_t sweeps, int64_t budget) {
    require(sweeps >= 0 && sweeps <= INT32_MAX, "sweeps must be in 0..2^31-1, got ", sweeps);
    require(budget >= 0 && budget <= INT32_MAX, "budget must be in 0..2^31-1, got ", budget);
    problem.tolerance_ppm = tolerance_ppm;
    problem.sweeps = static_cast<int32_t>(sweeps);
    problem.budget = static_cast<int32_t>(budget);
  }

  std::optional<Tensor> fixed_, ticks_, pour_;
};

}  // namespace isoload::ops
