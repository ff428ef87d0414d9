// round_split: checks, then every layer.
#include "algorithms/round_split.h"

#include <cmath>

#include "ops/loads_batch.h"
#include "ops/op.h"

namespace isoload::ops {

// A split of other loads, or of weights, is refused; one that is off by rounding is not.
template <class Real>
static void require_split(const LoadsBatch& loads, int64_t b, const Real* split) {
  for (int64_t p = 0; p < loads.P; ++p)
    require(split[p] >= 0 && std::isfinite(split[p]), "split must be finite and not negative, got ", split[p],
            " for slot ", p);
  const ReplicaTables t = loads.tables->layer(b);
  for (int e = 0; e < loads.E; ++e) {
    double copies = 0, found = 0;
    for (int64_t s = 0; s < loads.sources; ++s) copies += loads.of(b)[s * loads.E + e];
    for (int j = t.offsets[e]; j < t.offsets[e + 1]; ++j) found += split[t.slots[j]];
    require(std::fabs(found - copies) <= 1 + copies / 1000, "split must add up to the loads, got ", found,
            " for the ", copies, " copies of expert ", e);
  }
}

template <class Real>
static Tensor round_layers(const LoadsBatch& loads, const Tensor& split) {
  const Tensor quota = loads.per_layer({loads.P});
  auto problem = loads.problem<RoundingProblem<Real>>();
  problem.split = data<Real>(split);
  const bool on_cpu = plan_layers<RoundingPlanner<Real>>(
      loads.like, problem, mutable_data<int32_t>(quota), loads.B, 0,
      [&](const RoundingProblem<Real>&, int64_t b, int) { loads.explain(b); });
  for (int64_t b = 0; b < loads.B && on_cpu; ++b) require_split(loads, b, data<Real>(split) + b * loads.P);
  return quota;
}

Tensor round_split(const Tensor& split, const Tensor& loads, const Tensor& tables, int64_t num_ranks,
                   int64_t num_slots) {
  const LoadsBatch batch(loads, tables, num_ranks, num_slots);
  require_shape(split, "split", batch.sizes({num_slots}));
  const ScalarType type = split.scalar_type();
  require(type == ScalarType::Float || type == ScalarType::Double, "split must be float32 or float64, got ",
          dtype_name(type));
  require_device(split, "split", loads, "loads");
  return type == ScalarType::Float ? round_layers<float>(batch, dense(split))
                                   : round_layers<double>(batch, dense(split));
}

}  // namespace isoload::ops

ISOLOAD_OP(round_split)
