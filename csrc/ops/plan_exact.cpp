// plan_exact: checks, and a batch of layers in parallel.
#include <atomic>

#include "cpu/cpu.h"
#include "ops/device.h"
#include "ops/ops.h"
#include "ops/tensors.h"

namespace isoload::ops {

// A batch of exact splits: its inputs, checked, and its results.
class ExactBatch {
 public:
  ExactBatch(const Tensor& loads_in, const Tensor& tables_in, int64_t num_ranks, int64_t num_slots)
      : loads_(dense(loads_in)), batched_(tables_in.dim() == 2), R_(num_ranks), P_(num_slots) {
    require_dtype(loads_in, "loads", ScalarType::Int);
    require(R_ >= 1 && R_ <= kMaxRanks, "num_ranks must be in 1..", kMaxRanks, ", got ", R_);
    require(P_ >= R_ && P_ % R_ == 0, "num_slots must be a multiple of num_ranks=", R_, ", got ", P_);
    const int64_t dims = loads_.dim() - batched_;
    require(dims == 1 || (dims == 2 && loads_.size(batched_) == R_), "loads must be [E] or [", R_,
            ", E] per layer, got ", shape_text(loads_));
    E_ = loads_.size(loads_.dim() - 1);
    sources_ = dims == 1 ? 1 : R_;
    tables_.emplace(tables_in, P_, E_);
    require_device(tables_in, "tables", loads_in, "loads");
    require(!batched_ || loads_.size(0) == tables_->batch, "loads must have one entry per layer (",
            tables_->batch, "), got ", shape_text(loads_));
  }

  void add_fixed(const Tensor& fixed) {
    require_dtype(fixed, "fixed", ScalarType::Int);
    batched_ ? require_shape(fixed, "fixed", {tables_->batch, R_}) : require_shape(fixed, "fixed", {R_});
    require_device(fixed, "fixed", loads_, "loads");
    fixed_ = dense(fixed);
  }

  void add_ticks(const Tensor& ticks) {
    require_dtype(ticks, "ticks", ScalarType::Int);
    require_shape(ticks, "ticks", {R_});
    ticks_ = dense(ticks);
    require_device(*ticks_, "ticks", loads_, "loads");
    for (int64_t r = 0; r < R_ && loads_.is_cpu(); ++r) {
      const int32_t tick = data<int32_t>(*ticks_)[r];
      require(tick >= 1 && tick <= 1 << 20, "ticks must be in 1..2^20, got ", tick, " for rank ", r);
    }
  }

  void add_pour(const Tensor& pour) {
    require_dtype(pour, "pour", ScalarType::Int);
    batched_ ? require_shape(pour, "pour", {tables_->batch}) : require_shape(pour, "pour", {});
    require_device(pour, "pour", loads_, "loads");
    pour_ = dense(pour);
  }

  void set_objective(int64_t objective, int64_t ranks_per_node) {
    require(objective >= 0 && objective <= 2, "objective must be 0 (spread), 1 (local) or 2 (packed), got ",
            objective);
    require(ranks_per_node >= 1 && R_ % ranks_per_node == 0, "ranks_per_node must divide ", R_, ", got ",
            ranks_per_node);
    objective_ = static_cast<Objective>(objective);
    require(objective_ != Objective::local || loads_.dim() == 2 + batched_,
            "loads must be per source rank, [", R_, ", ", E_,
            "] per layer, for objective local, got the sum ", shape_text(loads_));
    per_node_ = ranks_per_node;
  }

  std::tuple<Tensor, Tensor, Tensor, Tensor> solve(int64_t tolerance_ppm, int64_t sweeps, int64_t budget) {
    require(sweeps >= 0 && sweeps <= INT32_MAX, "sweeps must be in 0..2^31-1, got ", sweeps);
    require(budget >= 0 && budget <= INT32_MAX, "budget must be in 0..2^31-1, got ", budget);
    const int64_t B = tables_->batch;
    const Tensor quota = per_layer(P_), telemetry = per_layer(4), peak = per_layer(), bound = per_layer();
    auto problem_of = [&](int64_t b) {
      ExactProblem problem = this->problem(b);
      problem.tolerance_ppm = tolerance_ppm;
      problem.sweeps = static_cast<int32_t>(sweeps);
      problem.budget = static_cast<int32_t>(budget);
      return problem;
    };
    auto result_of = [&](int64_t b) {
      return ExactResult{mutable_data<int32_t>(quota) + b * P_, mutable_data<int64_t>(peak) + b,
                         mutable_data<int64_t>(bound) + b, mutable_data<int32_t>(telemetry) + b * 4};
    };
    if (on_cuda(loads_, [&](auto stream) {
          const Scratch scratch(loads_, cuda::plan_exact_bytes(B, R_, E_));
          return cuda::plan_exact(problem_of(0), result_of(0), B, scratch.data(), stream);
        }))
      return {quota, peak, bound, telemetry};
    std::atomic<int64_t> failed{B};  // a throw inside parallel_for would lose its text
    auto run = [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        if (cpu::plan_exact(problem_of(b), result_of(b)) == PlanStatus::ok) continue;
        for (int64_t first = failed; b < first && !failed.compare_exchange_weak(first, b);) continue;
      }
    };
    B == 1 ? run(0, 1) : torch::stable::parallel_for(0, B, 8, run);
    if (failed < B) explain(problem(failed));
    return {quota, peak, bound, telemetry};
  }

 private:
  Tensor per_layer(int64_t length) const {
    return batched_ ? new_empty(loads_, {tables_->batch, length}) : new_empty(loads_, {length});
  }
  Tensor per_layer() const {
    return batched_ ? new_empty(loads_, {tables_->batch}, ScalarType::Long)
                    : new_empty(loads_, {}, ScalarType::Long);
  }

  ExactProblem problem(int64_t b) const {
    ExactProblem problem{};
    problem.R = static_cast<int>(R_);
    problem.E = static_cast<int>(E_);
    problem.S = static_cast<int>(P_ / R_);
    problem.tables = tables_->layer(b);
    problem.loads = data<int32_t>(loads_) + b * sources_ * E_;
    problem.num_sources = static_cast<int>(sources_);
    problem.objective = objective_;
    problem.per_node = static_cast<int>(per_node_);
    problem.fixed = fixed_ ? data<int32_t>(*fixed_) + b * R_ : nullptr;
    problem.ticks = ticks_ ? data<int32_t>(*ticks_) : nullptr;
    problem.pour = pour_ ? data<int32_t>(*pour_) + b : nullptr;
    return problem;
  }

  // Raises what the solver refused: it only knows that something is wrong, and here there is time to look.
  static void explain(const ExactProblem& problem) {
    int64_t copies = 0, lonely = -1;
    for (int64_t i = 0; i < int64_t(problem.num_sources) * problem.E; ++i) {
      const int64_t e = i % problem.E, n = problem.loads[i];
      require(n >= 0, "loads must not be negative, got ", n, " for expert ", e);
      if (n > 0 && problem.tables.copies(static_cast<int>(e)) == 0 && lonely < 0) lonely = e;
      copies += n;
    }
    for (int r = 0; problem.fixed && r < problem.R; ++r) {
      require(problem.fixed[r] >= 0, "fixed must not be negative, got ", problem.fixed[r], " for rank ", r);
      copies += problem.fixed[r];
    }
    if (problem.pour) {
      require(*problem.pour >= 0, "pour must not be negative, got ", *problem.pour);
      copies += *problem.pour;
    }
    require(copies <= INT32_MAX, "loads, fixed and pour must sum to less than 2^31 copies, got ", copies);
    require(lonely < 0, "loads must be 0 for an expert without a replica, got copies for expert ", lonely);
  }

  Tensor loads_;
  bool batched_;
  int64_t R_, P_, E_ = 0, sources_ = 0, per_node_ = 1;
  Objective objective_ = Objective::spread;
  std::optional<Tables> tables_;
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
