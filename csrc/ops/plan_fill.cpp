// plan_fill: checks of the start and the rules; layers one after another.
#include "algorithms/plan_fill.h"

#include <vector>

#include "ops/fill_batch.h"
#include "ops/op.h"

namespace isoload::ops {

namespace {

void check_start(const LevelFillProblem& in) {
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

std::tuple<Tensor, Tensor> plan_fill(const Tensor& loads, const Tensor& slots, const Tensor& home,
                                     int64_t num_ranks, int64_t ranks_per_node, int64_t spare_slots,
                                     const Maybe& fixed, const Maybe& start, const Maybe& alive,
                                     int64_t capacity_ppm, int64_t threshold_ppm, bool per_expert,
                                     int64_t min_chunk, int64_t near_import, int64_t far_import,
                                     int64_t near_export, int64_t far_export, bool within) {
  const FillBatch batch(slots, home, num_ranks, ranks_per_node, spare_slots, loads, fixed, alive, within);
  const auto before = batch.checked_per_layer(start, "start", {batch.P});
  LevelFillProblem rules{};
  constexpr int64_t most = 1000 * kMillion, dear = 1 << 30;
  rules.capacity_ppm = within_limits("capacity_ppm", capacity_ppm, kMillion, most);
  rules.threshold_ppm = within_limits("threshold_ppm", threshold_ppm, 0, most);
  rules.per_expert = per_expert;
  rules.min_chunk = within_limits("min_chunk", min_chunk, 1, INT32_MAX);
  rules.near_import = within_limits("near_import", near_import, 0, dear);
  rules.far_import = within_limits("far_import", far_import, 0, dear);
  rules.near_export = within_limits("near_export", near_export, 0, dear);
  rules.far_export = within_limits("far_export", far_export, 0, dear);
  rules.start = data<int32_t>(before);
  return batch.fill<LevelFillPlanner>(rules, true, [](const LevelFillProblem& in) {
    if (in.start) check_start(in);
  });
}

}  // namespace isoload::ops

ISOLOAD_OP(plan_fill)
