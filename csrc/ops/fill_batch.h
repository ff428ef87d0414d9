// A batch of layers whose spare slots are filled: placements, loads and ranks, checked.
#pragma once

#include <optional>

#include "ops/device.h"
#include "ops/tensors.h"
#include "rank_set.h"

namespace isoload::ops {

class FillBatch {
 public:
  FillBatch(const Tensor& slots, const Tensor& home, int64_t num_ranks, int64_t per_node, int64_t spare)
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

  // per_source: sums over sources are not enough.
  void add_loads(const Tensor& loads, bool per_source = false) {
    require_dtype(loads, "loads", ScalarType::Int);
    sources_ = per_source || loads.dim() == 2 + batched_ ? R_ : 1;
    per_source || loads.dim() == 2 + batched_ ? require_per_layer(loads, "loads", {R_, E_})
                                              : require_per_layer(loads, "loads", {E_});
    require_device(loads, "loads", slots_, "slot_to_expert");
    loads_ = dense(loads);
  }

  void add_fixed(const std::optional<Tensor>& fixed) {
    if (!fixed) return;
    require_dtype(*fixed, "fixed", ScalarType::Int);
    require_per_layer(*fixed, "fixed", {R_});
    require_device(*fixed, "fixed", slots_, "slot_to_expert");
    fixed_ = dense(*fixed);
  }

  void add_alive(const std::optional<Tensor>& alive) {
    if (alive) alive_ = checked_alive(*alive, R_, slots_, "slot_to_expert");
  }

  // The fields of layer b that every problem of this kind has.
  template <class Problem>
  void set(Problem& problem, int64_t b) const {
    problem.R = static_cast<int>(R_);
    problem.E = static_cast<int>(E_);
    problem.S = static_cast<int>(P_ / R_);
    problem.per_node = static_cast<int>(per_node_);
    problem.spare = static_cast<int>(spare_);
    problem.loads = data<int32_t>(*loads_) + b * sources_ * E_;
    problem.fixed = fixed_ ? data<int32_t>(*fixed_) + b * R_ : nullptr;
    problem.num_sources = static_cast<int>(sources_);
    problem.slot_to_expert = data<int32_t>(slots_) + b * P_;
    problem.home_slot = data<int32_t>(home_) + b * E_;
    problem.alive = alive_ ? data<bool>(*alive_) : nullptr;
  }

  // empty: nothing may lie in the spare slots.
  template <class Problem>
  static void check_placement(const Problem& in, bool empty) {
    for (int e = 0; e < in.E; ++e) {
      const int32_t p = in.home_slot[e];
      const bool held = p >= 0 && p < in.R * in.S && in.slot_to_expert[p] == e;
      require(held, "home_slot must hold its expert, slot ", p, " does not hold expert ", e);
    }
    for (int r = 0; r < in.R && empty; ++r)
      for (int p = (r + 1) * in.S - in.spare; p < (r + 1) * in.S; ++p)
        require(in.slot_to_expert[p] < 0, "slot_to_expert must be -1 in the last spare_slots=", in.spare,
                " slots of a rank, got ", in.slot_to_expert[p], " in slot ", p);
  }

  // Raises what a planner refused: it only knows that something is wrong, and here there is time to look.
  template <class Problem>
  static void explain(const Problem& in) {
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
  // A new tensor [length] or [L, length]; [] or [L] without a length.
  Tensor per_layer(int64_t length) const {
    return batched_ ? new_empty(slots_, {B_, length}) : new_empty(slots_, {length});
  }
  Tensor per_layer(ScalarType dtype) const {
    return batched_ ? new_empty(slots_, {B_}, dtype) : new_empty(slots_, {}, dtype);
  }

  const Tensor& slots() const { return slots_; }
  int64_t layers() const { return B_; }
  int64_t num_ranks() const { return R_; }
  int64_t num_experts() const { return E_; }
  int64_t num_slots() const { return P_; }
  int64_t spare() const { return spare_; }

 private:
  Tensor slots_, home_;
  bool batched_;
  int64_t R_, B_ = 0, P_ = 0, E_ = 0, per_node_ = 1, spare_ = 0, sources_ = 1;
  std::optional<Tensor> loads_, fixed_, alive_;
};

}  // namespace isoload::ops
