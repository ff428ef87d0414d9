// plan_lp: checks, and a batch of layers in parallel.
#include "algorithms/plan_lp.h"

#include <cmath>

#include "ops/loads_batch.h"
#include "ops/op.h"

namespace isoload::ops {

namespace {

using LpTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

template <class Real>
void check_amounts(const Maybe& amounts, const char* name, int64_t R) {
  for (int64_t i = 0; amounts && i < amounts->numel() && amounts->is_cpu(); ++i) {
    const Real value = data<Real>(amounts)[i];
    require(value >= 0 && std::isfinite(value), name, " must be finite and not negative, got ", value,
            " for rank ", i % R);
  }
}

// Raises why a layer with loads that can be planned was refused.
template <class Real>
void explain(const LpProblem<Real>& in) {
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
            "speeds must be positive on ranks with base load, got 0 for rank ", r, " with base ", in.base[r]);
}

template <class Real>
LpTensors solve(const LoadsBatch& loads, const Maybe& speeds_in, const Maybe& base_in, double tolerance,
                int64_t most) {
  constexpr ScalarType real = sizeof(Real) == 4 ? ScalarType::Float : ScalarType::Double;
  const auto speeds = checked(speeds_in, "speeds", real, {loads.R}, loads.like, "loads");
  const auto base = loads.checked_per_layer(base_in, "base", {loads.R}, real);
  check_amounts<Real>(speeds, "speeds", loads.R);
  check_amounts<Real>(base, "base", loads.R);
  require(tolerance >= 0 && tolerance <= 1, "tolerance must be in 0..1 (relative), got ", tolerance);
  require_in("iterations", most, 0, 1000);
  const Tensor split = loads.per_layer({loads.P}, real);
  const Tensor primal = loads.per_layer({}, real), dual = loads.per_layer({}, real);
  const Tensor iterations = loads.per_layer({}), status = loads.per_layer({});
  auto problem = loads.problem<LpProblem<Real>>();
  problem.speeds = data<Real>(speeds);
  problem.base = data<Real>(base);
  problem.tolerance = static_cast<Real>(tolerance);
  problem.iterations = static_cast<int>(most);
  const LpResult<Real> result{mutable_data<Real>(split), mutable_data<Real>(primal), mutable_data<Real>(dual),
                              mutable_data<int32_t>(iterations), mutable_data<int32_t>(status)};
  plan_layers<LpPlanner<Real>>(loads.like, problem, result, loads.B, 4,
                               [&](const LpProblem<Real>& in, int64_t b, int) {
                                 loads.explain(b);
                                 explain(in);
                               });
  return {split, primal, dual, iterations, status};
}

}  // namespace

LpTensors plan_lp(const Tensor& loads, const Tensor& tables, int64_t num_ranks, int64_t num_slots,
                  const Maybe& speeds, const Maybe& base, bool float64, double tolerance,
                  int64_t iterations) {
  const LoadsBatch batch(loads, tables, num_ranks, num_slots);
  return float64 ? solve<double>(batch, speeds, base, tolerance, iterations)
                 : solve<float>(batch, speeds, base, tolerance, iterations);
}

}  // namespace isoload::ops

ISOLOAD_OP(plan_lp)
