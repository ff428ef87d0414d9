// The index of the library: every op's schema and registration, in pipeline order.
#include "ops/ops.h"

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(isoload, m) {
  m.def("count(Tensor topk_ids, int num_experts) -> Tensor");
  m.def("replica_tables(Tensor slot_to_expert, int num_ranks, int num_experts, Tensor(a!) tables) -> ()");
  m.def(
      "plan_exact(Tensor loads, Tensor tables, int num_ranks, int num_slots, Tensor? fixed, Tensor? ticks, "
      "Tensor? pour, int objective, int ranks_per_node, int tolerance_ppm, int sweeps, int budget) -> "
      "(Tensor "
      "quota, Tensor peak, Tensor bound, Tensor telemetry)");
  m.def(
      "plan_active(Tensor loads, Tensor tables, int num_ranks, int num_slots, Tensor? ticks) -> "
      "(Tensor quota, Tensor active_peak, Tensor active_bound, Tensor telemetry)");
  m.def(
      "plan_lp(Tensor loads, Tensor tables, int num_ranks, int num_slots, Tensor? speeds, Tensor? base, "
      "bool float64, float tolerance, int iterations) -> (Tensor split, Tensor primal, Tensor dual, Tensor "
      "iterations, Tensor status)");
  m.def("round_split(Tensor split, Tensor loads, Tensor tables, int num_ranks, int num_slots) -> Tensor");
  m.def(
      "plan_spill(Tensor loads, Tensor slot_to_expert, Tensor home_slot, int num_ranks, int ranks_per_node, "
      "int spare_slots, Tensor? fixed, Tensor? start, Tensor? alive, int capacity_ppm, int threshold_ppm, "
      "bool per_expert, int tolerance_ppm, int min_chunk, int near_cost, int far_cost, int egress, bool "
      "within) -> "
      "(Tensor slot_to_expert, Tensor quota, Tensor level, Tensor telemetry)");
  m.def(
      "borrow(Tensor slot_to_expert, Tensor home, Tensor peers, Tensor(a!)[] spare, int num_ranks, int rank, "
      "int blocks) -> ()");
  m.def(
      "borrow_backward(Tensor slot_to_expert, Tensor home, Tensor peers, Tensor(a!)[] totals, int num_ranks, "
      "int rank, int spare_slots, ScalarType dtype, int blocks) -> ()");
  m.def(
      "share(Tensor loads, Tensor quota, Tensor tables, int ranks_per_node, int rank, bool locality) -> "
      "Tensor");
  m.def("share_alone(Tensor counts, Tensor quota, Tensor tables, int source) -> Tensor");
  m.def(
      "share_by_rank(Tensor loads, Tensor quota, Tensor tables, int ranks_per_node, bool locality) -> "
      "Tensor");
  m.def(
      "route(Tensor topk_ids, Tensor share_row, Tensor tables, int num_experts, bool prefer_visited) -> "
      "Tensor");
  m.def(
      "plan_waterfill(Tensor copies, Tensor tokens, int per_token, int ranks_per_node, int candidates, "
      "Tensor? "
      "ticks, Tensor? limits) -> (Tensor share, Tensor peak, Tensor bound)");
  m.def(
      "route_shared(Tensor slots, Tensor share_row, int slots_per_rank, int rank, int num_shared, bool "
      "strict) "
      "-> Tensor");
  m.def("route_sampled(Tensor topk_ids, Tensor weights, Tensor tables, int num_experts, int seed) -> Tensor");
  m.def(
      "append_shared_expert(Tensor slots, Tensor weights, Tensor ranks, int routed_per_rank, "
      "int? slots_per_rank, float weight) -> (Tensor, Tensor)");
  m.def(
      "route_shared_sampled(Tensor slots, Tensor load, Tensor? tokens, int slots_per_rank, int rank, "
      "str rule, int seed) -> Tensor");
  m.def("device_errors(Tensor like) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(isoload, CPU, m) {
  m.impl("count", TORCH_BOX(&isoload::ops::count));
  m.impl("replica_tables", TORCH_BOX(&isoload::ops::replica_tables));
  m.impl("plan_exact", TORCH_BOX(&isoload::ops::plan_exact));
  m.impl("plan_active", TORCH_BOX(&isoload::ops::plan_active));
  m.impl("plan_lp", TORCH_BOX(&isoload::ops::plan_lp));
  m.impl("round_split", TORCH_BOX(&isoload::ops::round_split));
  m.impl("plan_spill", TORCH_BOX(&isoload::ops::plan_spill));
  m.impl("borrow", TORCH_BOX(&isoload::ops::borrow));
  m.impl("borrow_backward", TORCH_BOX(&isoload::ops::borrow_backward));
  m.impl("share", TORCH_BOX(&isoload::ops::share));
  m.impl("share_by_rank", TORCH_BOX(&isoload::ops::share_by_rank));
  m.impl("share_alone", TORCH_BOX(&isoload::ops::share_alone));
  m.impl("route", TORCH_BOX(&isoload::ops::route));
  m.impl("plan_waterfill", TORCH_BOX(&isoload::ops::plan_waterfill));
  m.impl("route_shared", TORCH_BOX(&isoload::ops::route_shared));
  m.impl("route_sampled", TORCH_BOX(&isoload::ops::route_sampled));
  m.impl("append_shared_expert", TORCH_BOX(&isoload::ops::append_shared_expert));
  m.impl("route_shared_sampled", TORCH_BOX(&isoload::ops::route_shared_sampled));
  m.impl("device_errors", TORCH_BOX(&isoload::ops::device_errors));
}
