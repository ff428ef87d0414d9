// Every op's function, in pipeline order: each checks its arguments, allocates its results and calls
// csrc/cpu.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace isoload::ops {

using torch::stable::Tensor;

Tensor count(const Tensor& topk_ids, int64_t num_experts);
void replica_tables(const Tensor& slot_to_expert, int64_t num_ranks, int64_t num_experts, Tensor tables);
std::tuple<Tensor, Tensor, Tensor, Tensor> plan_exact(
    const Tensor& loads, const Tensor& tables, int64_t num_ranks, int64_t num_slots,
    const std::optional<Tensor>& fixed, const std::optional<Tensor>& ticks, const std::optional<Tensor>& pour,
    int64_t objective, int64_t ranks_per_node, int64_t tolerance_ppm, int64_t sweeps, int64_t budget);
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> plan_lp(const Tensor& loads, const Tensor& tables,
                                                           int64_t num_ranks, int64_t num_slots,
                                                           const std::optional<Tensor>& speeds,
                                                           const std::optional<Tensor>& base, bool float64,
                                                           double tolerance, int64_t iterations);
Tensor round_split(const Tensor& split, const Tensor& loads, const Tensor& tables, int64_t num_ranks,
                   int64_t num_slots);
Tensor share(const Tensor& loads, const Tensor& quota, const Tensor& tables, int64_t ranks_per_node,
             int64_t rank, bool locality);
Tensor share_by_rank(const Tensor& loads, const Tensor& quota, const Tensor& tables, int64_t ranks_per_node,
                     bool locality);
std::tuple<Tensor, Tensor, Tensor, Tensor> plan_active(const Tensor& loads, const Tensor& tables,
                                                       int64_t num_ranks, int64_t num_slots,
                                                       const std::optional<Tensor>& ticks);
std::tuple<Tensor, Tensor, Tensor, Tensor> plan_spill(
    const Tensor& loads, const Tensor& slot_to_expert, const Tensor& home_slot, int64_t num_ranks,
    int64_t ranks_per_node, int64_t spare_slots, const std::optional<Tensor>& fixed,
    const std::optional<Tensor>& start, const std::optional<Tensor>& alive, int64_t capacity_ppm,
    int64_t threshold_ppm, bool per_expert, int64_t tolerance_ppm, int64_t min_chunk, int64_t near_cost,
    int64_t far_cost, int64_t egress, bool within);
void borrow(const Tensor& slot_to_expert, const Tensor& home, const Tensor& peers, std::vector<Tensor> spare,
            int64_t num_ranks, int64_t rank, int64_t blocks);
void borrow_backward(const Tensor& slot_to_expert, const Tensor& home, const Tensor& peers,
                     std::vector<Tensor> totals, int64_t num_ranks, int64_t rank, int64_t spare_slots,
                     torch::headeronly::ScalarType dtype, int64_t blocks);
Tensor share_alone(const Tensor& counts, const Tensor& quota, const Tensor& tables, int64_t source);
Tensor route(const Tensor& topk_ids, const Tensor& share_row, const Tensor& tables, int64_t num_experts,
             bool prefer_visited);
Tensor route_sampled(const Tensor& topk_ids, const Tensor& weights, const Tensor& tables, int64_t num_experts,
                     int64_t seed);
std::tuple<Tensor, Tensor> append_shared_expert(const Tensor& slots, const Tensor& weights,
                                                const Tensor& ranks, int64_t routed_per_rank,
                                                std::optional<int64_t> slots_per_rank, double weight);
Tensor route_shared_sampled(const Tensor& slots, const Tensor& load, const std::optional<Tensor>& tokens,
                            int64_t slots_per_rank, int64_t rank, std::string rule, int64_t seed);
std::tuple<Tensor, Tensor, Tensor> plan_waterfill(const Tensor& copies, const Tensor& tokens,
                                                  int64_t per_token, int64_t ranks_per_node,
                                                  int64_t candidates, const std::optional<Tensor>& ticks,
                                                  const std::optional<Tensor>& limits);
Tensor route_shared(const Tensor& slots, const Tensor& share_row, int64_t slots_per_rank, int64_t rank,
                    int64_t num_shared, bool strict);
Tensor device_errors(const Tensor& like);

}  // namespace isoload::ops
