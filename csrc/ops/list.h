// Every op, and every rule that a kernel finds broken: registrations, the bits of a device's error word and
// their words in Python follow from here. Torch is not known here.
//
//   OP(function, schema)   in pipeline order; the function is in csrc/ops, under ISOLOAD_OP(function)
//   FAULT(bit, rule)       the next bit of the error word; a rule starts with its op's name
#pragma once

#include <cstdint>

namespace isoload {

// clang-format off
#define ISOLOAD_OPS(OP) \
  OP(count, \
     "(Tensor topk_ids, int num_experts, int num_shared) " \
     "-> (Tensor ids, Tensor counts, Tensor numbers, Tensor parts)") \
  OP(replica_tables, \
     "(Tensor slot_to_expert, int num_ranks, int num_experts, Tensor(a!) tables) -> ()") \
  OP(plan_exact, \
     "(Tensor loads, Tensor tables, int num_ranks, int num_slots, Tensor? fixed, Tensor? ticks, " \
     "Tensor? pour, int objective, int ranks_per_node, int tolerance_ppm, int sweeps, int budget, " \
     "int? rank) -> (Tensor quota, Tensor peak, Tensor bound, Tensor telemetry, Tensor send_counts)") \
  OP(plan_active, \
     "(Tensor loads, Tensor tables, int num_ranks, int num_slots) " \
     "-> (Tensor quota, Tensor active_peak, Tensor active_bound, Tensor telemetry)") \
  OP(plan_lp, \
     "(Tensor loads, Tensor tables, int num_ranks, int num_slots, Tensor? base, " \
     "bool float64, float tolerance, int iterations) -> (Tensor split, Tensor primal, " \
     "Tensor dual, Tensor iterations, Tensor status)") \
  OP(round_split, \
     "(Tensor split, Tensor loads, Tensor tables, int num_ranks, int num_slots) -> Tensor") \
  OP(plan_fill, \
     "(Tensor loads, Tensor slot_to_expert, Tensor home_slot, int num_ranks, int ranks_per_node, " \
     "int spare_slots, Tensor? fixed, Tensor? start, Tensor? alive, int capacity_ppm, " \
     "int threshold_ppm, bool per_expert, int min_chunk, int near_import, int far_import, " \
     "int near_export, int far_export, bool within) -> (Tensor slot_to_expert, Tensor telemetry)") \
  OP(top_up, \
     "(Tensor loads, Tensor slot_to_expert, Tensor home_slot, int num_ranks, int ranks_per_node, " \
     "int spare_slots, Tensor? fixed, Tensor? alive, bool within) " \
     "-> (Tensor slot_to_expert, Tensor telemetry)") \
  OP(plan_waterfill, \
     "(Tensor copies, Tensor tokens, int per_token, int ranks_per_node, " \
     "Tensor? ticks, Tensor? limits) -> (Tensor share, Tensor peak, Tensor bound)") \
  OP(plan_joint, \
     "(Tensor loads, Tensor tables, int num_ranks, int num_slots, int num_shared, int first_shared, " \
     "Tensor? ticks, int objective, int ranks_per_node, int tolerance_ppm, int sweeps, int budget, " \
     "int rank) -> (Tensor quota, Tensor peak, Tensor bound, Tensor telemetry, Tensor send_counts, " \
     "Tensor share)") \
  OP(plan_own, \
     "(Tensor counts, Tensor tables, int num_ranks, int num_slots, Tensor offset, " \
     "Tensor? fixed, Tensor? ticks, Tensor(a!)? recent, Tensor(b!)? sent, int source, SymInt layer, " \
     "int sweeps) -> Tensor") \
  OP(balance_own, \
     "(Tensor topk_ids, Tensor tables, int num_experts, int num_ranks, int num_slots, Tensor offset, " \
     "Tensor? ticks, Tensor(a!)? recent, Tensor(b!)? sent, int source, SymInt layer, int sweeps) " \
     "-> (Tensor slots, Tensor counts)") \
  OP(balance_same, \
     "(Tensor topk_ids, Tensor tables, int num_experts, int num_ranks, int num_slots, Tensor? ticks, " \
     "int objective, int ranks_per_node, int tolerance_ppm, int sweeps, int budget) " \
     "-> (Tensor slots, Tensor loads, Tensor quota, Tensor peak, Tensor bound, Tensor telemetry)") \
  OP(share, \
     "(Tensor loads, Tensor quota, Tensor tables, int ranks_per_node, int rank, bool locality) " \
     "-> Tensor") \
  OP(share_by_rank, \
     "(Tensor loads, Tensor quota, Tensor tables, int ranks_per_node, bool locality) -> Tensor") \
  OP(route, \
     "(Tensor topk_ids, Tensor numbers, Tensor parts, Tensor send_counts, Tensor tables, " \
     "int num_experts, int num_ranks, Tensor? shared_row, int num_shared, int first_shared, int home) " \
     "-> Tensor") \
  OP(route_sampled, \
     "(Tensor topk_ids, Tensor weights, Tensor tables, int num_experts, int seed, Tensor? step, " \
     "int rank) -> Tensor") \
  OP(route_shared, \
     "(Tensor slots, Tensor source_quota, int slots_per_rank, int rank, int num_shared) " \
     "-> Tensor") \
  OP(route_shared_sampled, \
     "(Tensor slots, Tensor load, Tensor? tokens, int slots_per_rank, int rank, str rule, " \
     "int seed, Tensor? step) -> Tensor") \
  OP(append_shared_expert, \
     "(Tensor slots, Tensor weights, Tensor ranks, int routed_per_rank, int? slots_per_rank, " \
     "float weight) -> (Tensor, Tensor)") \
  OP(number_rows, \
     "(Tensor slots, int slots_per_rank, int num_ranks) -> (Tensor ranks, Tensor numbers, Tensor counts)") \
  OP(pack_rows, \
     "(Tensor x, Tensor slots, Tensor weights, Tensor ranks, Tensor numbers, Tensor counts, " \
     "int slots_per_rank, int num_rows, int capacity, int slots_at, int weights_at, int bytes) " \
     "-> (Tensor payload, Tensor row_to_token, Tensor row_to_rank, Tensor token_to_rows)") \
  OP(group_copies, \
     "(Tensor slots, int first, int num_slots, int num_places) " \
     "-> (Tensor copy, Tensor slot, Tensor ends, Tensor position)") \
  OP(borrow, \
     "(Tensor slot_to_expert, Tensor home, Tensor peers, Tensor(a!)[] spare, int num_ranks, " \
     "int rank, int blocks) -> ()") \
  OP(borrow_backward, \
     "(Tensor slot_to_expert, Tensor home, Tensor peers, Tensor(a!)[] totals, int num_ranks, " \
     "int rank, int spare_slots, ScalarType dtype, int blocks) -> ()") \
  OP(device_errors, \
     "(Tensor like) -> Tensor")

#define ISOLOAD_FAULTS(FAULT) \
  FAULT(kCountId, \
        "count: topk_ids must be in -1..E-1") \
  FAULT(kPlanExact, \
        "plan_exact: loads, fixed and pour must not be negative, must sum to less than 2^31 copies, and " \
        "loads be 0 for an expert without a replica") \
  FAULT(kPlanActive, \
        "plan_active: loads must not be negative, must sum to less than 2^31 copies, and be 0 for an expert " \
        "without a replica") \
  FAULT(kPlanWaterfill, \
        "plan_waterfill: copies and tokens must not be negative, must sum to less than 2^31 copies, and fit " \
        "the limits") \
  FAULT(kShareQuota, \
        "share: quota must conserve loads") \
  FAULT(kRouteId, \
        "route: topk_ids must be in -1..E-1") \
  FAULT(kRouteShare, \
        "route: topk_ids must hold each expert as often as its share says") \
  FAULT(kSampledId, \
        "route_sampled: topk_ids must be in -1..E-1") \
  FAULT(kSampledWeights, \
        "route_sampled: weights must be positive for a replica of every expert that is routed") \
  FAULT(kSharedSlot, \
        "route_shared: slots must be in -1..P-1") \
  FAULT(kSharedSampledSlot, \
        "route_shared_sampled: slots must be in -1..P-1") \
  FAULT(kAppendedSlot, \
        "append_shared_expert: slots and ranks must be at least -1, and what they become less than 2^31") \
  FAULT(kPlanLp, \
        "plan_lp: loads and base must not be negative, must sum to less than 2^31 copies, and loads be 0 " \
        "for an expert without a replica") \
  FAULT(kRoundSplit, \
        "round_split: loads must not be negative, must sum to less than 2^31 copies, and be 0 for an expert " \
        "without a replica") \
  FAULT(kPlanFill, \
        "plan_fill: loads and fixed must not be negative and must sum to less than 2^31 copies, and a rank " \
        "be alive") \
  FAULT(kBorrowedSlot, \
        "borrow: slot_to_expert must be in -1..E-1, and what it borrows have a home with an address") \
  FAULT(kBackwardSlot, \
        "borrow_backward: slot_to_expert must be in -1..E-1, and what it borrows have a home, on this rank " \
        "within totals") \
  FAULT(kTopUp, \
        "top_up: loads and fixed must not be negative and must sum to less than 2^31 copies, and a rank be " \
        "alive") \
  FAULT(kGroupPlaces, \
        "group_copies: num_places must be at least the number of copies present") \
  FAULT(kPlanOwn, \
        "plan_own: counts and fixed must not be negative, must sum to at most 2^31 / (num_ranks + 2) copies, " \
        "offset be in 0..2^20, and counts be 0 for an expert without a replica") \
  FAULT(kBalanceId, \
        "balance_own: topk_ids must be in -1..E-1") \
  FAULT(kBalanceOwn, \
        "balance_own: offset must be in 0..2^20, and topk_ids of experts with a replica")
// clang-format on

#define ISOLOAD_FAULT(bit, rule) bit##_,
enum FaultNumber { ISOLOAD_FAULTS(ISOLOAD_FAULT) };
#undef ISOLOAD_FAULT

#define ISOLOAD_FAULT(bit, rule) bit = 1 << bit##_,
enum Fault : int32_t { ISOLOAD_FAULTS(ISOLOAD_FAULT) };
#undef ISOLOAD_FAULT

}  // namespace isoload
