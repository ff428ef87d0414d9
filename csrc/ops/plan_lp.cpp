// plan_lp: checks, and a batch of layers in parallel.
#include <atomic>
#include <cmath>

#include "cpu/cpu.h"
#include "ops/ops.h"
#include "ops/tensors.h"

namespace isoload::ops {

// A batch of real-valued splits: its inputs, checked, and its results.
template <class Real>
class LpBatch {
 public:
  static constexpr ScalarType kReal = sizeof(Real) == 4 ? ScalarType::Float : ScalarType::Double;

  LpBatch(const Tensor& loads_in, const Tensor& tables_in, int64_t num_ranks, int64_t num_slots)
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
    require(!batched_ || loads_.size(0) == tables_->batch, "loads must have one entry per layer (",
            tables_->batch, "), got ", shape_text(loads_));
  }

  void add_speeds(const Tensor& speeds) {
    require_dtype(speeds, "speeds", kReal);
    require_shape(speeds, "speeds", {R_});
    speeds_ = dense(speeds);
    require_amounts(*speeds_, "speeds");
  }

  void add_base(const Tensor& base) {
    require_dtype(base, "base", kReal);
    batched_ ? require_shape(base, "base", {tables_->batch, R_}) : require_shape(base, "base", {R_});
    base_ = dense(base);
    require_amounts(*base_, "base");
  }

  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> solve(double tolerance, int64_t most) {
    require(tolerance >= 0 && tolerance <= 1, "tolerance must be in 0..1 (relative), got ", tolerance);
    require(most >= 0 && most <= kMostIterations, "iterations must be in 0..", kMostIterations, ", got ",
            most);
    const int64_t B = tables_->batch;
    const Tensor split = batched_ ? new_empty(loads_, {B, P_}, kReal) : new_empty(loads_, {P_}, kReal);
    const Tensor primal = per_layer(kReal), dual = per_layer(kReal);
    const Tensor iterations = per_layer(ScalarType::Int), status = per_layer(ScalarType::Int);
    std::atomic<int64_t> failed{B};  // a throw inside parallel_for would lose its text
    auto run = [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        LpProblem<Real> problem = this->problem(b);
        problem.tolerance = static_cast<Real>(tolerance);
        problem.iterations = static_cast<int>(most);
        const LpResult<Real> result{mutable_data<Real>(split) + b * P_, mutable_data<Real>(primal) + b,
                                    mutable_data<Real>(dual) + b, mutable_data<int32_t>(iterations) + b,
                                    mutable_data<int32_t>(status) + b};
        if (cpu::plan_lp(problem, result)) continue;
        for (int64_t first = failed; b < first && !failed.compare_exchange_weak(first, b);) continue;
      }
    };
    B == 1 ? run(0, 1) : torch::stable::parallel_for(0, B, 4, run);
    if (failed < B) explain(problem(failed));
    return {split, primal, dual, iterations, status};
  }

 private:
  static constexpr int64_t kMostIterations = 1000;

  Tensor per_layer(ScalarType dtype) const {
    return batched_ ? new_empty(loads_, {tables_->batch}, dtype) : new_empty(loads_, {}, dtype);
  }

  void require_amounts(const Tensor& tensor, const char* name) const {
    const Real* values = data<Real>(tensor);
    for (int64_t i = 0; i < tensor.numel(); ++i)
      require(values[i] >= 0 && std::isfinite(values[i]), name, " must be finite and not negative, got ",
              values[i], " for rank ", i % R_);
  }

  LpProblem<Real> problem(int64_t b) const {
    LpProblem<Real> problem{};
    problem.R = static_cast<int>(R_);
    problem.E = static_cast<int>(E_);
    problem.S = static_cast<int>(P_ / R_);
    problem.tables = tables_->layer(b);
    problem.loads = data<int32_t>(loads_) + b * sources_ * E_;
    problem.num_sources = static_cast<int>(sources_);
    problem.speeds = speeds_ ? data<Real>(*speeds_) : nullptr;
    problem.base = base_ ? data<Real>(*base_) + b * R_ : nullptr;
    return problem;
  }

  // Raises what the solver refused: it only knows that something is wrong, and here there is time to look.
  static void explain(const LpProblem<Real>& problem) {
    const ReplicaTables& t = problem.tables;
    int64_t copies = 0;
    for (int64_t i = 0; i < int64_t(problem.num_sources) * problem.E; ++i) {
      const int64_t e = i % problem.E, n = problem.loads[i];
      require(n >= 0, "loads must not be negative, got ", n, " for expert ", e);
      copies += n;
    }
    require(copies <= INT32_MAX, "loads must sum to less than 2^31 copies, got ", copies);
    for (int64_t i = 0; i < int64_t(problem.num_sources) * problem.E; ++i) {
      const int e = static_cast<int>(i % problem.E), first = t.offsets[e], last = t.offsets[e + 1];
      if (problem.loads[i] == 0) continue;
      require(first < last, "loads must be 0 for an expert without a replica, got copies for expert ", e);
      bool taken = !problem.speeds;
      for (int j = first; j < last; ++j) taken = taken || problem.speeds[t.ranks[j]] > 0;
      require(taken, "speeds must be positive on a rank of every expert with copies, got 0 for rank ",
              t.ranks[first], ", which holds expert ", e, last - first > 1 ? " like all its ranks" : "");
    }
    for (int r = 0; problem.speeds && problem.base && r < problem.R; ++r)
      require(problem.speeds[r] > 0 || !(problem.base[r] > 0),
              "speeds must be positive on a rank with base load, got 0 for rank ", r, " with base ",
              problem.base[r]);
  }

  Tensor loads_;
  bool batched_;
  int64_t R_, P_, E_ = 0, sources_ = 0;
  std::optional<Tables> tables_;
  std::optional<Tensor> speeds_, base_;
};

template <class Real>
static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> solve(const Tensor& loads, const Tensor& tables,
                                                                int64_t num_ranks, int64_t num_slots,
                                                                const std::optional<Tensor>& speeds,
                                                                const std::optional<Tensor>& base,
                                                                double tolerance, int64_t iterations) {
  LpBatch<Real> batch(loads, tables, num_ranks, num_slots);
  if (speeds) batch.add_speeds(*speeds);
  if (base) batch.add_base(*base);
  return batch.solve(tolerance, iterations);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> plan_lp(const Tensor& loads, const Tensor& tables,
                                                           int64_t num_ranks, int64_t num_slots,
                                                           const std::optional<Tensor>& speeds,
                                                           const std::optional<Tensor>& base, bool float64,
                                                           double tolerance, int64_t iterations) {
  const auto solver = float64 ? solve<double> : solve<float>;
  return solver(loads, tables, num_ranks, num_slots, speeds, base, tolerance, iterations);
}

}  // namespace isoload::ops
