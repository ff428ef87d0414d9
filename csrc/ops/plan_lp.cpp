// plan_lp: checks, and a batch of layers in parallel.
#include "algorithms/plan_lp.h"

#include <cmath>

#include "ops/loads_batch.h"
#include "ops/op.h"
#include "ops/plan_layers.h"

namespace isoload::ops {

using LpTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// A batch of real-valued splits: its inputs, checked, and its results.
template <class Real>
class LpBatch {
 public:
  LpBatch(const LoadsBatch& loads, const std::optional<Tensor>& speeds, const std::optional<Tensor>& base)
      : loads_(loads) {
    if (speeds) {
      require_shape(*speeds, "speeds", {loads_.R});
      speeds_ = amounts(*speeds, "speeds");
    }
    if (base) {
      loads_.require_per_layer(*base, "base", loads_.R);
      base_ = amounts(*base, "base");
    }
  }

  LpTensors solve(double tolerance, int64_t most) {
    require(tolerance >= 0 && tolerance <= 1, "tolerance must be in 0..1 (relative), got ", tolerance);
    require(most >= 0 && most <= kMostIterations, "iterations must be in 0..", kMostIterations, ", got ",
            most);
    const Tensor split = loads_.per_layer(loads_.P, kReal);
    const Tensor primal = loads_.per_layer(kReal), dual = loads_.per_layer(kReal);
    const Tensor iterations = loads_.per_layer(ScalarType::Int), status = loads_.per_layer(ScalarType::Int);
    LpProblem<Real> problem = this->problem();
    problem.tolerance = static_cast<Real>(tolerance);
    problem.iterations = static_cast<int>(most);
    const LpResult<Real> result{mutable_data<Real>(split), mutable_data<Real>(primal),
                                mutable_data<Real>(dual), mutable_data<int32_t>(iterations),
                                mutable_data<int32_t>(status)};
    plan_layers<LpPlanner<Real>>(loads_.loads, problem, result, loads_.B, 4,
                                 [&](const LpProblem<Real>& in, int64_t b, int) { explain(in, b); });
    return {split, primal, dual, iterations, status};
  }

 private:
  static constexpr ScalarType kReal = sizeof(Real) == 4 ? ScalarType::Float : ScalarType::Double;
  static constexpr int64_t kMostIterations = 1000;

  Tensor amounts(const Tensor& tensor, const char* name) const {
    require_dtype(tensor, name, kReal);
    require_device(tensor, name, loads_.loads, "loads");
    const Tensor amounts = dense(tensor);
    for (int64_t i = 0; i < amounts.numel() && amounts.is_cpu(); ++i) {
      const Real value = data<Real>(amounts)[i];
      require(value >= 0 && std::isfinite(value), name, " must be finite and not negative, got ", value,
              " for rank ", i % loads_.R);
    }
    return amounts;
  }

  LpProblem<Real> problem() const {
    LpProblem<Real> problem{};
    problem.R = static_cast<int>(loads_.R);
    problem.E = static_cast<int>(loads_.E);
    problem.S = static_cast<int>(loads_.P / loads_.R);
    problem.tables = loads_.tables->layer(0);
    problem.loads = loads_.of(0);
    problem.num_sources = static_cast<int>(loads_.sources);
    problem.speeds = speeds_ ? data<Real>(*speeds_) : nullptr;
    problem.base = base_ ? data<Real>(*base_) : nullptr;
    return problem;
  }

  // Raises why layer b was refused.
  void explain(const LpProblem<Real>& in, int64_t b) const {
    loads_.explain(b);
    for (int64_t i = 0; i < int64_t(in.num_sources) * in.E; ++i) {
      const int e = static_cast<int>(i % in.E), first = in.tables.offsets[e];
      if (in.loads[i] == 0) continue;
      bool taken = false;
      for (int j = first; j < in.tables.offsets[e + 1]; ++j) taken |= in.speeds[in.tables.ranks[j]] > 0;
      require(taken, "speeds must be positive on one of an expert's ranks, got 0 for rank ",
              in.tables.ranks[first], ", where expert ", e, " has copies");
    }
    for (int r = 0; r < in.R; ++r)
      require(in.speeds[r] > 0 || in.base[r] == 0,
              "speeds must be positive on ranks with base load, got 0 for rank ", r, " with base ",
              in.base[r]);
  }

  const LoadsBatch& loads_;
  std::optional<Tensor> speeds_, base_;
};

LpTensors plan_lp(const Tensor& loads, const Tensor& tables, int64_t num_ranks, int64_t num_slots,
                  const std::optional<Tensor>& speeds, const std::optional<Tensor>& base, bool float64,
                  double tolerance, int64_t iterations) {
  const LoadsBatch batch(loads, tables, num_ranks, num_slots);
  return float64 ? LpBatch<double>(batch, speeds, base).solve(tolerance, iterations)
                 : LpBatch<float>(batch, speeds, base).solve(tolerance, iterations);
}

}  // namespace isoload::ops

ISOLOAD_OP(plan_lp)
