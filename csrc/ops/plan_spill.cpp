// plan_spill: checks of the loads, the placement and the rules; layers one after another.
#include "cpu/cpu.h"
#include "ops/ops.h"
#include "ops/tensors.h"
#include "rank_set.h"

namespace isoload::ops {

namespace {

// Raises what the planner refused: it only knows that something is wrong, and here there is time to look.
void explain(const SpillProblem& in) {
  int64_t copies = 0;
  for (int64_t i = 0; i < int64_t(in.num_sources) * in.E; ++i) {
    require(in.loads[i] >= 0, "loads must not be negative, got ", in.loads[i], " for expert ", i % in.E);
    copies += in.loads[i];
  }
  for (int r = 0; in.fixed && r < in.R; ++r) {
    require(in.fixed[r] >= 0, "fixed must not be negative, got ", in.fixed[r], " for rank ", r);
    copies += in.fixed[r];
  }
  require(copies <= INT32_MAX, "loads and fixed must sum to less than 2^31 copies, got ", copies);
}

void check_placement(const SpillProblem& in) {
  for (int e = 0; e < in.E; ++e) {
    const int32_t p = in.home_slot[e];
    const bool held = p >= 0 && p < in.R * in.S && in.slot_to_expert[p] == e;
    require(held, "home_slot must hold its expert, slot ", p, " does not hold expert ", e);
  }
  for (int r = 0; r < in.R; ++r)
    for (int p = (r + 1) * in.S - in.spare; p < (r + 1) * in.S; ++p)
      require(in.slot_to_expert[p] < 0, "slot_to_expert must be -1 in the last spare_slots=", in.spare,
              " slots of a rank, got ", in.slot_to_expert[p], " in slot ", p);
}

void check_rules(const SpillProblem& in) {
  constexpr int64_t most = 1000 * kMillion, far = 1 << 30;
  auto within = [](const char* name, int64_t value, int64_t low, int64_t high) {
    require(value >= low && value <= high, name, " must be in ", low, "..", high, ", got ", value);
  };
  if (in.capacity_ppm != 0) within("capacity_ppm", in.capacity_ppm, kMillion, most);
  within("threshold_ppm", in.threshold_ppm, 0, most);
  within("tolerance_ppm", in.tolerance_ppm, 0, most);
  within("min_chunk", in.min_chunk, 1, INT32_MAX);
  within("near_cost", in.near_cost, 0, far);
  within("far_cost", in.far_cost, 0, far);
  within("egress", in.egress, 0, INT32_MAX);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> plan_spill(
    const Tensor& loads_in, const Tensor& slots_in, const Tensor& home_in, int64_t num_ranks,
    int64_t ranks_per_node, int64_t spare_slots, const std::optional<Tensor>& fixed_in,
    const std::optional<Tensor>& alive_in, int64_t capacity_ppm, int64_t threshold_ppm, bool per_expert,
    int64_t tolerance_ppm, int64_t min_chunk, int64_t near_cost, int64_t far_cost, int64_t egress) {
  require_dtype(loads_in, "loads", ScalarType::Int);
  require_dtype(slots_in, "slot_to_expert", ScalarType::Int);
  require_dtype(home_in, "home_slot", ScalarType::Int);
  const int64_t dims = slots_in.dim(), R = num_ranks;
  require(R >= 1 && R <= kMaxRanks, "num_ranks must be in 1..", kMaxRanks, ", got ", R);
  require(dims == 1 || dims == 2, "slot_to_expert must be [P] or [L, P], got ", shape_text(slots_in));
  const bool batched = dims == 2;
  const int64_t P = slots_in.size(dims - 1), B = batched ? slots_in.size(0) : 1;
  require(P >= R && P % R == 0, "slot_to_expert must have a multiple of num_ranks=", R, " slots, got ", P);
  require(spare_slots >= 0 && spare_slots <= P / R, "spare_slots must be in 0..", P / R, ", got ",
          spare_slots);
  require(ranks_per_node >= 1 && R % ranks_per_node == 0, "ranks_per_node must divide ", R, ", got ",
          ranks_per_node);
  require(home_in.dim() == dims && home_in.size(dims - 1) >= 1, "home_slot must have as many dimensions as ",
          "slot_to_expert and at least one expert, got ", shape_text(home_in));
  const int64_t E = home_in.size(dims - 1);
  if (batched) require_shape(home_in, "home_slot", {B, E});
  const bool per_source = loads_in.dim() == dims + 1;
  if (per_source)
    batched ? require_shape(loads_in, "loads", {B, R, E}) : require_shape(loads_in, "loads", {R, E});
  else
    batched ? require_shape(loads_in, "loads", {B, E}) : require_shape(loads_in, "loads", {E});
  const Tensor loads = dense(loads_in), slots = dense(slots_in), home = dense(home_in);
  std::optional<Tensor> fixed, alive;
  if (fixed_in) {
    require_dtype(*fixed_in, "fixed", ScalarType::Int);
    batched ? require_shape(*fixed_in, "fixed", {B, R}) : require_shape(*fixed_in, "fixed", {R});
    fixed = dense(*fixed_in);
  }
  if (alive_in) {
    require(alive_in->scalar_type() == ScalarType::Bool, "alive must be bool, got ",
            dtype_name(alive_in->scalar_type()));
    require_shape(*alive_in, "alive", {R});
    alive = dense(*alive_in);
    bool any = false;
    for (int64_t r = 0; r < R; ++r) any |= data<bool>(*alive)[r];
    require(any, "alive must be true for at least one rank, got none");
  }
  auto per_layer = [&](int64_t length) {
    return batched ? new_empty(loads, {B, length}) : new_empty(loads, {length});
  };
  const Tensor filled = per_layer(P), quota = per_layer(P), telemetry = per_layer(5);
  const Tensor level =
      batched ? new_empty(loads, {B}, ScalarType::Long) : new_empty(loads, {}, ScalarType::Long);
  const int64_t sources = per_source ? R : 1;
  for (int64_t b = 0; b < B; ++b) {
    SpillProblem problem{};
    problem.R = static_cast<int>(R);
    problem.E = static_cast<int>(E);
    problem.S = static_cast<int>(P / R);
    problem.per_node = static_cast<int>(ranks_per_node);
    problem.spare = static_cast<int>(spare_slots);
    problem.loads = data<int32_t>(loads) + b * sources * E;
    problem.fixed = fixed ? data<int32_t>(*fixed) + b * R : nullptr;
    problem.num_sources = static_cast<int>(sources);
    problem.slot_to_expert = data<int32_t>(slots) + b * P;
    problem.home_slot = data<int32_t>(home) + b * E;
    problem.alive = alive ? data<bool>(*alive) : nullptr;
    problem.capacity_ppm = capacity_ppm;
    problem.threshold_ppm = threshold_ppm;
    problem.per_expert = per_expert;
    problem.tolerance_ppm = tolerance_ppm;
    problem.min_chunk = min_chunk;
    problem.near_cost = near_cost;
    problem.far_cost = far_cost;
    problem.egress = static_cast<int32_t>(egress < INT32_MAX ? egress : INT32_MAX);
    check_rules(problem);
    check_placement(problem);
    const SpillResult result{mutable_data<int32_t>(filled) + b * P, mutable_data<int32_t>(quota) + b * P,
                             mutable_data<int64_t>(level) + b, mutable_data<int32_t>(telemetry) + b * 5};
    if (cpu::plan_spill(problem, result) != SpillStatus::ok) explain(problem);
  }
  return {filled, quota, level, telemetry};
}

}  // namespace isoload::ops
