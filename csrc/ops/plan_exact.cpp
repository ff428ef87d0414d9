// plan_exact: checks, and a batch of layers in parallel.
#include "algorithms/plan_exact.h"

#include "ops/loads_batch.h"
#include "ops/op.h"
#include "ops/plan_layers.h"

namespace isoload::ops {

// A batch of exact splits: its inputs, checked, and its results.
class ExactBatch {
 public:
  ExactBatch(const Tensor& loads, const Tensor& tables, int64_t num_ranks, int64_t num_slots)
      : in_(loads, tables, num_ranks, num_slots) {}

  void add_fixed(const Tensor& fixed) {
    require_dtype(fixed, "fixed", ScalarType::Int);
    in_.require_per_layer(fixed, "fixed", in_.R);
    require_device(fixed, "fixed", in_.loads, "loads");
    fixed_ = dense(fixed);
  }

  void add_ticks(const Tensor& ticks) { ticks_ = in_.checked_ticks(ticks); }

  void add_pour(const Tensor& pour) {
    require_dtype(pour, "pour", ScalarType::Int);
    in_.batched ? require_shape(pour, "pour", {in_.B}) : require_shape(pour, "pour", {});
    require_device(pour, "pour", in_.loads, "loads");
    pour_ = dense(pour);
  }

  void set_objective(int64_t objective, int64_t ranks_per_node) {
    require(objective >= 0 && objective <= 2, "objective must be 0 (spread), 1 (local) or 2 (packed), got ",
            objective);
    require(ranks_per_node >= 1 && in_.R % ranks_per_node == 0, "ranks_per_node must divide ", in_.R,
            ", got ", ranks_per_node);
    objective_ = static_cast<Objective>(objective);
    require(objective_ != Objective::local || in_.loads.dim() == 2 + in_.batched,
            "loads must be per source rank, [", in_.R, ", ", in_.E,
            "] per layer, for objective local, got the sum ", shape_text(in_.loads));
    per_node_ = ranks_per_node;
  }

  std::tuple<Tensor, Tensor, Tensor, Tensor> solve(int64_t tolerance_ppm, int64_t sweeps, int64_t budget) {
    require(sweeps >= 0 && sweeps <= INT32_MAX, "sweeps must be in 0..2^31-1, got ", sweeps);
    require(budget >= 0 && budget <= INT32_MAX, "budget must be in 0..2^31-1, got ", budget);
    const Tensor quota = in_.per_layer(in_.P), telemetry = in_.per_layer(4);
    const Tensor peak = in_.per_layer(ScalarType::Long), bound = in_.per_layer(ScalarType::Long);
    ExactProblem problem = this->problem();
    problem.tolerance_ppm = tolerance_ppm;
    problem.sweeps = static_cast<int32_t>(sweeps);
    problem.budget = static_cast<int32_t>(budget);
    const ExactResult result{mutable_data<int32_t>(quota), mutable_data<int64_t>(peak),
                             mutable_data<int64_t>(bound), mutable_data<int32_t>(telemetry)};
    plan_layers<ExactPlanner>(in_.loads, problem, result, in_.B, 8,
                              [&](const ExactProblem& in, int64_t b, int) { explain(in, b); });
    return {quota, peak, bound, telemetry};
  }

 private:
  ExactProblem problem() const {
    ExactProblem problem{};
    problem.R = static_cast<int>(in_.R);
    problem.E = static_cast<int>(in_.E);
    problem.S = static_cast<int>(in_.P / in_.R);
    problem.tables = in_.tables->layer(0);
    problem.loads = in_.of(0);
    problem.num_sources = static_cast<int>(in_.sources);
    problem.objective = objective_;
    problem.per_node = static_cast<int>(per_node_);
    problem.fixed = fixed_ ? data<int32_t>(*fixed_) : nullptr;
    problem.ticks = ticks_ ? data<int32_t>(*ticks_) : nullptr;
    problem.pour = pour_ ? data<int32_t>(*pour_) : nullptr;
    return problem;
  }

  // Raises what the solver refused in layer b.
  void explain(const ExactProblem& problem, int64_t b) const {
    int64_t besides = 0;
    for (int r = 0; problem.fixed && r < problem.R; ++r) {
      require(problem.fixed[r] >= 0, "fixed must not be negative, got ", problem.fixed[r], " for rank ", r);
      besides += problem.fixed[r];
    }
    if (problem.pour) {
      require(*problem.pour >= 0, "pour must not be negative, got ", *problem.pour);
      besides += *problem.pour;
    }
    in_.explain(b, besides, "loads, fixed and pour");
  }

  LoadsBatch in_;
  int64_t per_node_ = 1;
  Objective objective_ = Objective::spread;
  std::optional<Tensor> fixed_, ticks_, pour_;
};

std::tuple<Tensor, Tensor, Tensor, Tensor> plan_exact(
    const Tensor& loads, const Tensor& tables, int64_t num_ranks, int64_t num_slots,
    const std::optional<Tensor>& fixed, const std::optional<Tensor>& ticks, const std::optional<Tensor>& pour,
    int64_t objective, int64_t ranks_per_node, int64_t tolerance_ppm, int64_t sweeps, int64_t budget) {
  ExactBatch batch(loads, tables, num_ranks, num_slots);
  if (fixed) batch.add_fixed(*fixed);
  if (ticks) batch.add_ticks(*ticks);
  if (pour) batch.add_pour(*pour);
  batch.set_objective(objective, ranks_per_node);
  return batch.solve(tolerance_ppm, sweeps, budget);
}

}  // namespace isoload::ops

ISOLOAD_OP(plan_exact)
