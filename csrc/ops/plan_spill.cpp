// plan_spill: checks of the loads, the placement and the rules; layers one after another.
#include <vector>

#include "cpu/cpu.h"
#include "ops/op.h"
#include "rank_set.h"

namespace isoload::ops {

namespace {

// A batch of layers that spill: its placements, loads and ranks, checked, and its results.
class SpillBatch {
 public:
  SpillBatch(const Tensor& slots, const Tensor& home, int64_t num_ranks, int64_t per_node, int64_t spare)
      : slots_(dense(slots)), home_(dense(home)), batched_(slots.dim() == 2), R_(num_ranks) {
    require_dtype(slots, "slot_to_expert", ScalarType::Int);
    require_dtype(home, "home_slot", ScalarType::Int);
    require(R_ >= 1 && R_ <= kMaxRanks, "num_ranks must be in 1..", kMaxRanks, ", got ", R_);
    require(batched_ || slots.dim() == 1, "slot_to_expert must be [P] or [L, P], got ", shape_text(slots));
    B_ = batched_ ? slots.size(0) : 1, P_ = slots.size(batched_);
    require(P_ >= R_ && P_ % R_ == 0, "slot_to_expert must have a multiple of num_ranks=", R_, " slots, got ",
            P_);
    require(spare >= 0 && spare <= P_ / R_, "spare_slots must be in 0..", P_ / R_, ", got ", spare);
    require(per_node >= 1 && R_ % per_node == 0, "ranks_per_node must divide ", R_, ", got ", per_node);
    require(home.dim() == slots.dim() && home.size(batched_) >= 1, "home_slot must have as many dimensions ",
            "as slot_to_expert and at least one expert, got ", shape_text(home));
    E_ = home.size(batched_);
    per_node_ = per_node, spare_ = spare;
    require_per_layer(home, "home_slot", {E_});
    require_device(home, "home_slot", slots, "slot_to_expert");
  }

  void add_loads(const Tensor& loads) {
    require_dtype(loads, "loads", ScalarType::Int);
    sources_ = loads.dim() == 2 + batched_ ? R_ : 1;
    loads.dim() == 2 + batched_ ? require_per_layer(loads, "loads", {R_, E_})
                                : require_per_layer(loads, "loads", {E_});
    require_device(loads, "loads", slots_, "slot_to_expert");
    loads_ = dense(loads);
  }

  void add_fixed(const Tensor& fixed) {
    require_dtype(fixed, "fixed", ScalarType::Int);
    require_per_layer(fixed, "fixed", {R_});
    require_device(fixed, "fixed", slots_, "slot_to_expert");
    fixed_ = dense(fixed);
  }

  void add_start(const Tensor& start) {
    require_dtype(start, "start", ScalarType::Int);
    require_per_layer(start, "start", {P_});
    require_device(start, "start", slots_, "slot_to_expert");
    start_ = dense(start);
  }

  void add_alive(const Tensor& alive) {
    require(alive.scalar_type() == ScalarType::Bool, "alive must be bool, got ",
            dtype_name(alive.scalar_type()));
    require_shape(alive, "alive", {R_});
    require_device(alive, "alive", slots_, "slot_to_expert");
    alive_ = dense(alive);
    bool any = !alive.is_cpu();
    for (int64_t r = 0; r < R_ && !any; ++r) any = data<bool>(*alive_)[r];
    require(any, "alive must be true for at least one rank, got none");
  }

  // rules: the problem of any layer as far as the layers share it.
  std::tuple<Tensor, Tensor, Tensor, Tensor> solve(const SpillProblem& rules) const {
    const Tensor filled = per_layer(P_), quota = per_layer(P_), telemetry = per_layer(5);
    const Tensor level =
        batched_ ? new_empty(slots_, {B_}, ScalarType::Long) : new_empty(slots_, {}, ScalarType::Long);
    auto result = [&](int64_t b) {
      return SpillResult{mutable_data<int32_t>(filled) + b * P_, mutable_data<int32_t>(quota) + b * P_,
                         mutable_data<int64_t>(level) + b, mutable_data<int32_t>(telemetry) + b * 5};
    };
    if (on_cuda(slots_, [&](auto stream) {
          const Scratch scratch(slots_, cuda::plan_spill_bytes(B_, R_, E_, P_ / R_));
          return cuda::plan_spill(problem(rules, 0), result(0), B_, scratch.data(), stream);
        }))
      return {filled, quota, level, telemetry};
    for (int64_t b = 0; b < B_; ++b) {
      const SpillProblem layer = problem(rules, b);
      check_placement(layer);
      if (layer.start) check_start(layer);
      if (cpu::plan_spill(layer, result(b)) != SpillStatus::ok) explain(layer);
    }
    return {filled, quota, level, telemetry};
  }

 private:
  SpillProblem problem(SpillProblem problem, int64_t b) const {
    problem.R = static_cast<int>(R_);
    problem.E = static_cast<int>(E_);
    problem.S = static_cast<int>(P_ / R_);
    problem.per_node = static_cast<int>(per_node_);
    problem.spare = static_cast<int>(spare_);
    problem.loads = data<int32_t>(*loads_) + b * sources_ * E_;
    problem.fixed = fixed_ ? data<int32_t>(*fixed_) + b * R_ : nullptr;
    problem.start = start_ ? data<int32_t>(*start_) + b * P_ : nullptr;
    problem.num_sources = static_cast<int>(sources_);
    problem.slot_to_expert = data<int32_t>(slots_) + b * P_;
    problem.home_slot = data<int32_t>(home_) + b * E_;
    problem.alive = alive_ ? data<bool>(*alive_) : nullptr;
    return problem;
  }

  static void check_placement(const SpillProblem& in) {
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

  // Raises what the planner refused: it only knows that something is wrong, and here there is time to look.
  static void explain(const SpillProblem& in) {
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

  void require_per_layer(const Tensor& tensor, const char* name, std::initializer_list<int64_t> one) const {
    if (!batched_) return require_shape(tensor, name, one);
    const int64_t first = one.begin()[0];
    one.size() == 1 ? require_shape(tensor, name, {B_, first})
                    : require_shape(tensor, name, {B_, first, one.begin()[1]});
  }
  Tensor per_layer(int64_t length) const {
    return batched_ ? new_empty(slots_, {B_, length}) : new_empty(slots_, {length});
  }

  Tensor slots_, home_;
  bool batched_;
  int64_t R_, B_ = 0, P_ = 0, E_ = 0, per_node_ = 1, spare_ = 0, sources_ = 1;
  std::optional<Tensor> loads_, fixed_, start_, alive_;
};

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
    const Tensor& loads, const Tensor& slots, const Tensor& home, int64_t num_ranks, int64_t ranks_per_node,
    int64_t spare_slots, const std::optional<Tensor>& fixed, const std::optional<Tensor>& start,
    const std::optional<Tensor>& alive, int64_t capacity_ppm, int64_t threshold_ppm, bool per_expert,
    int64_t tolerance_ppm, int64_t min_chunk, int64_t near_cost, int64_t far_cost, int64_t egress,
    bool within) {
  SpillBatch batch(slots, home, num_ranks, ranks_per_node, spare_slots);
  batch.add_loads(loads);
  if (fixed) batch.add_fixed(*fixed);
  if (start) batch.add_start(*start);
  if (alive) batch.add_alive(*alive);
  SpillProblem rules{};
  rules.capacity_ppm = capacity_ppm;
  rules.threshold_ppm = threshold_ppm;
  rules.per_expert = per_expert;
  rules.tolerance_ppm = tolerance_ppm;
  rules.min_chunk = min_chunk;
  rules.near_cost = near_cost;
  rules.far_cost = far_cost;
  rules.egress = static_cast<int32_t>(egress < INT32_MAX ? egress : INT32_MAX);
  rules.within = within;
  check_rules(rules);
  return batch.solve(rules);
}

}  // namespace isoload::ops

ISOLOAD_OP(plan_spill)
