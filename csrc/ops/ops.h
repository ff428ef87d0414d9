// Every op's function, in pipeline order: each checks its arguments, allocates its results and calls
// csrc/cpu.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace isoload::ops {

using torch::stable::Tensor;

Tensor count(const Tensor& topk_ids, int64_t num_experts);
void replica_tables(const Tensor& slot_to_expert, int64_t num_ranks, int64_t num_experts, Tensor tables);
std::tuple<Tensor, Tensor, Tensor, Tensor> plan_exact(const Tensor& loads, const Tensor& tables,
                                                      int64_t num_ranks, int64_t num_slots,
                                                      const std::optional<Tensor>& fixed,
                                                      const std::optional<Tensor>& ticks,
                                                      int64_t tolerance_ppm, int64_t sweeps, int64_t budget);
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> plan_lp(const Tensor& loads, const Tensor& tables,
                                                           int64_t num_ranks, int64_t num_slots,
                                                           const std::optional<Tensor>& speeds,
                                                           const std::optional<Tensor>& base, bool float64,
                                                           double tolerance, int64_t iterations);
Tensor round_split(const Tensor& split, const Tensor& loads, const Tensor& tables, int64_t num_ranks,
                   int64_t num_slots);
Tensor share(const Tensor& loads, const Tensor& quota, const Tensor& tables, int64_t ranks_per_node,
             int64_t rank, bool locality);
Tensor route(const Tensor& topk_ids, const Tensor& share_row, const Tensor& tables, int64_t num_experts,
             bool prefer_visited);
Tensor route_sampled(const Tensor& topk_ids, const Tensor& weights, const Tensor& tables, int64_t num_experts,
                     int64_t seed);

}  // namespace isoload::ops
