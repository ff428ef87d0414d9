// route and route_sampled: checks of ids, shares and weights.
#include "cpu/cpu.h"
#include "ops/op.h"
#include "ops/route_checks.h"
#include "rank_set.h"

namespace isoload::ops {

Tensor route(const Tensor& topk_ids, const Tensor& share_row_in, const Tensor& tables_in, int64_t num_experts,
             bool prefer_visited) {
  require_copies(topk_ids);
  require_row(share_row_in);
  const Tensor ids = dense(topk_ids), source_quota = dense(share_row_in);
  const int64_t P = source_quota.size(0), T = ids.size(0), K = ids.size(1);
  const Tables tables(tables_in, P, num_experts);
  require(tables_in.dim() == 1, "tables must be of one layer, got ", shape_text(tables_in));
  Tensor slots = new_empty(ids, {ids.size(0), ids.size(1)}, ids.scalar_type());
  require_device(source_quota, "source_quota", ids, "topk_ids");
  require_device(tables_in, "tables", ids, "topk_ids");
  if (on_cuda(ids, [&](auto stream) {
        const cuda::Route problem{T,
                                  static_cast<int>(K),
                                  static_cast<int>(num_experts),
                                  static_cast<int>(P),
                                  tables.layer(0),
                                  data<int32_t>(source_quota),
                                  prefer_visited};
        const Scratch scratch(ids, cuda::route_bytes(problem));
        auto launch = [&](auto id) {
          using Id = decltype(id);
          return cuda::route(problem, data<Id>(ids), mutable_data<Id>(slots), scratch.data(), stream);
        };
        return ids.scalar_type() == ScalarType::Int ? launch(int32_t()) : launch(int64_t());
      }))
    return slots;
  auto run = [&](auto id) {
    using Id = decltype(id);
    return cpu::route(data<Id>(ids), T, K, num_experts, P, tables.layer(0), data<int32_t>(source_quota),
                      prefer_visited, mutable_data<Id>(slots));
  };
  check_route(ids.scalar_type() == ScalarType::Int ? run(int32_t()) : run(int64_t()), num_experts);
  return slots;
}

Tensor route_sampled(const Tensor& topk_ids, const Tensor& weights_in, const Tensor& tables_in,
                     int64_t num_experts, int64_t seed, const std::optional<Tensor>& step, int64_t rank) {
  require_ids(topk_ids, "topk_ids");
  require(topk_ids.dim() == 2, "topk_ids must be [T, K], got ", shape_text(topk_ids));
  require_dtype(weights_in, "weights", ScalarType::Float);
  require(weights_in.dim() == 1, "weights must be [P], got ", shape_text(weights_in));
  const Tensor ids = dense(topk_ids), weights = dense(weights_in);
  const Tables tables(tables_in, weights.size(0), num_experts);
  require(tables_in.dim() == 1, "tables must be of one layer, got ", shape_text(tables_in));
  Tensor slots = new_empty(ids, {ids.size(0), ids.size(1)}, ids.scalar_type());
  require_device(weights, "weights", ids, "topk_ids");
  require_device(tables_in, "tables", ids, "topk_ids");
  require(rank >= 0 && rank < kMaxRanks, "rank must be in 0..", kMaxRanks - 1, ", got ", rank);
  const Stream words{static_cast<uint64_t>(seed), step_number(step, ids, "topk_ids"), static_cast<int>(rank)};
  if (on_cuda(ids, [&](auto stream) {
        auto launch = [&](auto id) {
          using Id = decltype(id);
          return cuda::route_sampled(data<Id>(ids), ids.numel(), num_experts, tables.layer(0),
                                     data<float>(weights), words, mutable_data<Id>(slots), stream);
        };
        return ids.scalar_type() == ScalarType::Int ? launch(int32_t()) : launch(int64_t());
      }))
    return slots;
  auto run = [&](auto id) {
    using Id = decltype(id);
    return cpu::route_sampled(data<Id>(ids), ids.numel(), num_experts, tables.layer(0), data<float>(weights),
                              words, mutable_data<Id>(slots));
  };
  const cpu::RouteFault fault = ids.scalar_type() == ScalarType::Int ? run(int32_t()) : run(int64_t());
  if (fault.kind == cpu::RouteFault::bad_weight)
    require(false, "weights must be finite and not negative, got ", data<float>(weights)[fault.value],
            " for slot ", fault.value);
  require(fault.kind != cpu::RouteFault::not_the_share,
          "weights must be positive for a replica of every expert that is ", "routed, expert ", fault.value,
          " has none");
  check_route(fault, num_experts);
  return slots;
}

}  // namespace isoload::ops

ISOLOAD_OP(route)
ISOLOAD_OP(route_sampled)
