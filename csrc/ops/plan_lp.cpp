// plan_lp: checks, and a batch of layers in parallel.
#include "algorithms/plan_lp.h"

#include <cmath>

#include "ops/loads_batch.h"
#include "ops/op.h"

namespace isoload::ops {

namespace {

using LpTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

template <class Real>
void check_base(const Maybe& base, int64_t R) {
  for (int64_t i = 0; base && i < base->numel() && base->is_cpu(); ++i) {
    const Real value = data<Real>(base)[i];
    require(value >= 0 && std::isfinite(value), "base must be finite and not negative, got ", value,
            " for rank ", i % R);
  }
}

template <class Real>
LpTensors solve(const LoadsBatch& loads, const Maybe& base_in, double tolerance, int64_t most) {
  constexpr ScalarType real = sizeof(Real) == 4 ? ScalarType::Float : ScalarType::Double;
  const auto base = loads.checked_per_layer(base_in, "base", {loads.R}, real);
  check_base<Real>(base, loads.R);
  require(tolerance >= 0 && tolerance <= 1, "tolerance must be in 0..1 (relative), got ", tolerance);
  require_in("iterations", most, 0, 1000);
  const Tensor split = loads.per_layer({loads.P}, real);
  const Tensor primal = loads.per_layer({}, real), dual = loads.per_layer({}, real);
  const Tensor iterations = loads.per_layer({}), status = loads.per_layer({});
  auto problem = loads.problem<LpProblem<Real>>();
  problem.base = data<Real>(base);
  problem.tolerance = static_cast<Real>(tolerance);
  problem.iterations = static_cast<int>(most);
  const LpResult<Real> result{mutable_data<Real>(split), mutable_data<Real>(primal), mutable_data<Real>(dual),
                              mutable_data<int32_t>(iterations), mutable_data<int32_t>(status)};
  plan_layers<LpPlanner<Real>>(loads.like, problem, result, loads.B, 4,
                               [&](const LpProblem<Real>&, int64_t b, int) { loads.explain(b); });
  return {split, primal, dual, iterations, status};
}

}  // namespace

LpTensors plan_lp(const Tensor& loads, const Tensor& tables, int64_t num_ranks, int64_t num_slots,
                  const Maybe& base, bool float64, double tolerance, int64_t iterations) {
  const LoadsBatch batch(loads, tables, num_ranks, num_slots);
  return float64 ? solve<double>(batch, base, tolerance, iterations)
                 : solve<float>(batch, base, tolerance, iterations);
}

}  // namespace isoload::ops

ISOLOAD_OP(plan_lp)
