// A batch of exact splits: the inputs of plan_exact and plan_joint, checked, and the results of both.
#pragma once

#include "algorithms/plan_exact.h"
#include "ops/loads_batch.h"
#include "ops/op.h"

namespace isoload::ops {

struct ExactBatch {
  ExactBatch(const Tensor& loads, const Tensor& tables, int64_t num_ranks, int64_t num_slots,
             const Maybe& fixed_in, const Maybe& ticks_in, const Maybe& pour_in, int64_t objective,
             int64_t ranks_per_node, int64_t tolerance_ppm, int64_t sweeps, int64_t budget,
             int64_t num_shared = 0)
      : in(loads, tables, num_ranks, num_slots, num_shared),
        fixed(in.checked_per_layer(fixed_in, "fixed", {in.R})),
        ticks(checked_ticks(ticks_in, in.R, loads, "loads")),
        pour(in.checked_per_layer(pour_in, "pour", {})) {
    problem = in.problem<ExactProblem>();
    problem.fixed = data<int32_t>(fixed);
    problem.ticks = data<int32_t>(ticks);
    problem.pour = data<int32_t>(pour);
    require(objective == 0 || objective == 1, "objective must be 0 (spread) or 1 (local), got ", objective);
    require_per_node(ranks_per_node, in.R);
    problem.objective = static_cast<Objective>(objective);
    if (problem.objective == Objective::local) require_per_source(", for objective local");
    problem.per_node = static_cast<int>(ranks_per_node);
    problem.tolerance_ppm = tolerance_ppm;
    problem.sweeps = require_int("sweeps", sweeps);
    problem.budget = require_int("budget", budget);
    quota = in.per_layer({in.P}), telemetry = in.per_layer({4});
    peak = in.per_layer({}, ScalarType::Long), bound = in.per_layer({}, ScalarType::Long);
  }

  void require_per_source(const char* what) const {
    require(in.like.dim() == 2 + in.batched, "loads must be per source rank, [", in.R, ", ", in.E,
            "] per layer", what, ", got the sum ", shape_text(in.like));
  }

  ExactResult result() const {
    return {mutable_data<int32_t>(quota), mutable_data<int64_t>(peak), mutable_data<int64_t>(bound),
            mutable_data<int32_t>(telemetry)};
  }

  // Raises what the solver refused in layer b.
  void explain(const ExactProblem& refused, int64_t b) const {
    int64_t besides = sum_fixed(refused.fixed, refused.R);
    if (refused.pour) {
      require(*refused.pour >= 0, "pour must not be negative, got ", *refused.pour);
      besides += *refused.pour;
    }
    in.explain(b, besides, "loads, fixed and pour");
  }

  LoadsBatch in;
  Maybe fixed, ticks, pour;
  ExactProblem problem;  // of layer 0
  Tensor quota, peak, bound, telemetry;
};

}  // namespace isoload::ops
