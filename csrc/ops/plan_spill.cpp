// plan_spill: checks of the start and the rules; layers one after another.
#include <vector>

#include "cpu/cpu.h"
#include "ops/fill_batch.h"
#include "ops/op.h"

namespace isoload::ops {

namespace {

// A batch of layers that spill, and its results.
class SpillBatch : public FillBatch {
 public:
  using FillBatch::FillBatch;

  void add_start(const Tensor& start) {
    require_dtype(start, "start", ScalarType::Int);
    require_per_layer(start, "start", {num_slots()});
    require_device(start, "start", slots(), "slot_to_expert");
    start_ = dense(start);
  }

  // rules: the problem of any layer as far as the layers share it.
  std::tuple<Tensor, Tensor, Tensor, Tensor> solve(const SpillProblem& rules) const {
    const int64_t P = num_slots(), B = layers(), R = num_ranks();
    const Tensor filled = per_layer(P), quota = per_layer(P), telemetry = per_layer(5);
    const Tensor level = per_layer(ScalarType::Long);
    auto result = [&](int64_t b) {
      return SpillResult{mutable_data<int32_t>(filled) + b * P, mutable_data<int32_t>(quota) + b * P,
                         mutable_data<int64_t>(level) + b, mutable_data<int32_t>(telemetry) + b * 5};
    };
    if (on_cuda(slots(), [&](auto stream) {
          const Scratch scratch(slots(), cuda::plan_spill_bytes(B, R, num_experts(), P / R));
          return cuda::plan_spill(problem(rules, 0), result(0), B, scratch.data(), stream);
        }))
      return {filled, quota, level, telemetry};
    for (int64_t b = 0; b < B; ++b) {
      const SpillProblem layer = problem(rules, b);
      check_placement(layer, true);
      if (layer.start) check_start(layer);
      if (cpu::plan_spill(layer, result(b)) != SpillStatus::ok) explain(layer);
    }
    return {filled, quota, level, telemetry};
  }

 private:
  SpillProblem problem(SpillProblem problem, int64_t b) const {
    set(problem, b);
    problem.start = start_ ? data<int32_t>(*start_) + b * num_slots() : nullptr;
    return problem;
  }

  static void check_start(const SpillProblem& in) {
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

  std::optional<Tensor> start_;
};

int32_t checked(const char* name, int64_t value, int64_t low, int64_t high) {
  require(value >= low && value <= high, name, " must be in ", low, "..", high, ", got ", value);
  return static_cast<int32_t>(value);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> plan_spill(
    const Tensor& loads, const Tensor& slots, const Tensor& home, int64_t num_ranks, int64_t ranks_per_node,
    int64_t spare_slots, const std::optional<Tensor>& fixed, const std::optional<Tensor>& start,
    const std::optional<Tensor>& alive, int64_t capacity_ppm, int64_t threshold_ppm, bool per_expert,
    int64_t tolerance_ppm, int64_t min_chunk, int64_t near_cost, int64_t far_cost, int64_t egress,
    bool within) {
  SpillBatch batch(slots, home, num_ranks, ranks_per_node, spare_slots);
  batch.add_loads(loads);
  batch.add_fixed(fixed);
  if (start) batch.add_start(*start);
  batch.add_alive(alive);
  SpillProblem rules{};
  constexpr int64_t most = 1000 * kMillion, far = 1 << 30;
  if (capacity_ppm != 0) rules.capacity_ppm = checked("capacity_ppm", capacity_ppm, kMillion, most);
  rules.threshold_ppm = checked("threshold_ppm", threshold_ppm, 0, most);
  rules.per_expert = per_expert;
  rules.tolerance_ppm = checked("tolerance_ppm", tolerance_ppm, 0, most);
  rules.min_chunk = checked("min_chunk", min_chunk, 1, INT32_MAX);
  rules.near_cost = checked("near_cost", near_cost, 0, far);
  rules.far_cost = checked("far_cost", far_cost, 0, far);
  rules.egress = checked("egress", egress < INT32_MAX ? egress : INT32_MAX, 0, INT32_MAX);
  rules.within = within;
  return batch.solve(rules);
}

}  // namespace isoload::ops

ISOLOAD_OP(plan_spill)
