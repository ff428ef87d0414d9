// plan_spill: checks of the start and the rules; layers one after another.
#include "algorithms/plan_spill.h"

#include <vector>

#include "ops/fill_batch.h"
#include "ops/op.h"

namespace isoload::ops {

namespace {

void check_start(const SpillProblem& in) {
  std::vector<int64_t> left(in.E);
  for (int64_t i = 0; i < int64_t(in.num_sources) * in.E; ++i) left[i % in.E] += in.loads[i];
  for (int p = 0; p < in.R * in.S; ++p) {
    const int32_t e = in.slot_to_expert[p], copies = in.start[p];
    require(copies >= 0, "start must not be negative, got ", copies, " in slot ", p);
    require(copies == 0 || (e >= 0 && e < in.E), "start must be 0 in slots without a routed expert, got ",
            copies, " in slot ", p);
    if (copies > 0) left[e] -= copies;
  }
  for (int e = 0; e < in.E; ++e)
    require(left[e] == 0, "start must add up to the loads, got ", left[e], " copies too few of expert ", e);
}

int32_t within_limits(const char* name, int64_t value, int64_t low, int64_t high) {
  require_in(name, value, low, high);
  return static_cast<int32_t>(value);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> plan_spill(
    const Tensor& loads, const Tensor& slots, const Tensor& home, int64_t num_ranks, int64_t ranks_per_node,
    int64_t spare_slots, const Maybe& fixed, const Maybe& start, const Maybe& alive, int64_t capacity_ppm,
    int64_t threshold_ppm, bool per_expert, int64_t tolerance_ppm, int64_t min_chunk, int64_t near_cost,
    int64_t far_cost, int64_t egress, bool within) {
  const FillBatch batch(slots, home, num_ranks, ranks_per_node, spare_slots, loads, fixed, alive);
  const auto before = batch.checked_per_layer(start, "start", {batch.P});
  SpillProblem rules{};
  constexpr int64_t most = 1000 * kMillion, far = 1 << 30;
  if (capacity_ppm != 0) rules.capacity_ppm = within_limits("capacity_ppm", capacity_ppm, kMillion, most);
  rules.threshold_ppm = within_limits("threshold_ppm", threshold_ppm, 0, most);
  rules.per_expert = per_expert;
  rules.tolerance_ppm = within_limits("tolerance_ppm", tolerance_ppm, 0, most);
  rules.min_chunk = within_limits("min_chunk", min_chunk, 1, INT32_MAX);
  rules.near_cost = within_limits("near_cost", near_cost, 0, far);
  rules.far_cost = within_limits("far_cost", far_cost, 0, far);
  rules.egress = within_limits("egress", egress < INT32_MAX ? egress : INT32_MAX, 0, INT32_MAX);
  rules.within = within;
  rules.start = data<int32_t>(before);
  const Tensor filled = batch.per_layer({batch.P}), quota = batch.per_layer({batch.P});
  const Tensor level = batch.per_layer({}, ScalarType::Long), telemetry = batch.per_layer({5});
  const SpillResult result{mutable_data<int32_t>(filled), mutable_data<int32_t>(quota),
                           mutable_data<int64_t>(level), mutable_data<int32_t>(telemetry)};
  batch.solve<SpillPlanner>(rules, result, true, [](const SpillProblem& in) {
    if (in.start) check_start(in);
  });
  return {filled, quota, level, telemetry};
}

}  // namespace isoload::ops

ISOLOAD_OP(plan_spill)
