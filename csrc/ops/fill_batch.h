// A batch of layers whose spare slots are filled: placements, loads and ranks, checked.
#pragma once

#include "algorithms/spare_fill.h"
#include "ops/plan_layers.h"
#include "rank_set.h"

namespace isoload::ops {

struct FillBatch : Layers {
  FillBatch(const Tensor& slots, const Tensor& home_in, int64_t num_ranks, int64_t per_node, int64_t spare,
            const Tensor& loads_in, const Maybe& fixed_in, const Maybe& alive_in, bool within)
      : Layers{dense(slots), "slot_to_expert", slots.dim() == 2, 1},
        R(num_ranks),
        home(dense(home_in)),
        loads(dense(loads_in)) {
    require_dtype(slots, "slot_to_expert", ScalarType::Int);
    require_dtype(home_in, "home_slot", ScalarType::Int);
    require_in("num_ranks", R, 1, kMaxRanks);
    require(batched || slots.dim() == 1, "slot_to_expert must be [P] or [L, P], got ", shape_text(slots));
    B = batched ? slots.size(0) : 1, P = slots.size(batched);
    require(P >= R && P % R == 0, "slot_to_expert must have a multiple of num_ranks=", R, " slots, got ", P);
    require_in("spare_slots", spare, 0, P / R);
    require_per_node(per_node, R);
    require(home_in.dim() == slots.dim() && home_in.size(batched) >= 1, "home_slot must have as many ",
            "dimensions as slot_to_expert and at least one expert, got ", shape_text(home_in));
    E = home_in.size(batched);
    home = checked_per_layer(home_in, "home_slot", {E});
    const bool by_source = loads_in.dim() == 2 + batched;
    loads = checked_per_layer(loads_in, "loads", by_source ? Sizes{R, E} : Sizes{E});
    fixed = checked_per_layer(fixed_in, "fixed", {R});
    alive = checked_alive(alive_in, R, like, like_name);
    first_ = {static_cast<int>(R),     static_cast<int>(E),
              static_cast<int>(P / R), static_cast<int>(per_node),
              static_cast<int>(spare), data<int32_t>(loads),
              data<int32_t>(fixed),    static_cast<int>(by_source ? R : 1),
              data<int32_t>(like),     data<int32_t>(home),
              data<bool>(alive),       within};
  }

  // A planner over the batch; problem: its own fields. empty: see below; check(in): what else a layer must
  // be.
  template <class Planner, class Check>
  void solve(typename Planner::Problem problem, const typename Planner::Result& result, bool empty,
             Check&& check) const {
    static_cast<FillProblem&>(problem) = first_;
    for (int64_t b = 0; b < B && like.is_cpu(); ++b) {
      typename Planner::Problem in = problem;
      typename Planner::Result out = result;
      Planner::select(in, out, b);
      check_placement(in, empty);
      check(in);
    }
    plan_layers<Planner>(like, problem, result, B, 0,
                         [](const FillProblem& refused, int64_t, int) { explain(refused); });
  }
  // Filled slots and telemetry.
  template <class Planner, class Check>
  std::tuple<Tensor, Tensor> fill(const typename Planner::Problem& problem, bool empty, Check&& check) const {
    const Tensor filled = per_layer({P}), telemetry = per_layer({5});
    const FillResult result{mutable_data<int32_t>(filled), mutable_data<int32_t>(telemetry)};
    solve<Planner>(problem, result, empty, check);
    return {filled, telemetry};
  }
  template <class Planner>
  std::tuple<Tensor, Tensor> fill(const typename Planner::Problem& problem, bool empty) const {
    return fill<Planner>(problem, empty, [](const FillProblem&) {});
  }

  // empty: nothing may lie in the spare slots.
  static void check_placement(const FillProblem& in, bool empty) {
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
  static void explain(const FillProblem& in) {
    int64_t copies = 0;
    for (int64_t i = 0; i < int64_t(in.num_sources) * in.E; ++i) {
      require(in.loads[i] >= 0, "loads must not be negative, got ", in.loads[i], " for expert ", i % in.E);
      copies += in.loads[i];
    }
    copies += sum_fixed(in.fixed, in.R);
    require(copies <= INT32_MAX, "loads and fixed must sum to less than 2^31 copies, got ", copies);
  }

  int64_t R, P = 0, E = 0;
  Tensor home, loads;
  Maybe fixed, alive;

 private:
  FillProblem first_{};  // layer 0
};

}  // namespace isoload::ops
