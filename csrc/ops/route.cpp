// route and route_sampled: checks of ids, numbers, shares and weights.
#include "cpu/route.h"

#include "ops/op.h"
#include "ops/route_checks.h"
#include "rank_set.h"

namespace isoload::ops {

namespace {

void check_route(const cpu::RouteFault& fault, int64_t E) {
  require(fault.kind != cpu::RouteFault::bad_id, "topk_ids must be in -1..", E - 1, ", got ", fault.value);
  require(fault.kind != cpu::RouteFault::not_shared, "topk_ids must end in the shared experts from ", E,
          " on, or in -1 where all routed choices are, row ", fault.value, " does not");
  require(fault.kind != cpu::RouteFault::not_the_share,
          "topk_ids must hold each expert as often as its share says, ", "expert ", fault.value, " does not");
}

// parts [C, E]: a view of a wider one is as good.
cpu::Numbered checked_numbers(const Tensor& numbers, const Tensor& parts, const Tensor& ids, int64_t E) {
  checked(numbers, "numbers", ScalarType::Int, {ids.size(0), ids.size(1)}, ids, "topk_ids");
  require_dtype(parts, "parts", ScalarType::Int);
  require_shape(parts, "parts", {cpu::num_parts(ids.size(0)), E});
  require_device(parts, "parts", ids, "topk_ids");
  require(E == 1 || parts.stride(1) == 1, "parts must have rows without gaps, got stride ", parts.stride(1));
  return {data<int32_t>(numbers), data<int32_t>(parts), parts.stride(0)};
}

// Where the shared copies go: home, or as row [R] of their share says.
cpu::SharedRoute checked_shared(const Tensor& ids, const Maybe& row, int64_t P, int64_t num_ranks,
                                int64_t num_shared, int64_t first_shared, int64_t home) {
  const int64_t T = ids.size(0), width = ids.size(1), R = num_ranks;
  require_in("num_shared", num_shared, 0, 1024);
  if (num_shared == 0) return {};
  require(width >= num_shared, "topk_ids must be [T, K + ", num_shared, "], got ", shape_text(ids));
  require(R >= 1 && R <= kMaxRanks && P % R == 0, "num_ranks must divide ", P, " slots and be in 1..",
          kMaxRanks, ", got ", R);
  const int64_t most = P / R - num_shared;
  require(first_shared >= 0 && first_shared <= most, "first_shared must be in 0..", most,
          " with num_shared=", num_shared, ", got ", first_shared);
  require_in("home", home, 0, R - 1);
  if (row) {
    checked(row, "shared_row", ScalarType::Int, {R}, ids, "topk_ids");
    require(row->is_contiguous(), "shared_row must have no gaps");
    if (ids.is_cpu()) require_copies_of_ranks(*row);
  }
  cpu::SharedRoute shared{};
  shared.T = T, shared.K = static_cast<int>(width - num_shared);
  shared.R = static_cast<int>(R), shared.S = static_cast<int>(P / R);
  shared.home = static_cast<int>(home), shared.first_shared = static_cast<int>(first_shared);
  shared.num_shared = static_cast<int>(num_shared);
  shared.source_quota = data<int32_t>(row);
  shared.slots_width = shared.width = static_cast<int>(width);
  return shared;
}

}  // namespace

Tensor route(const Tensor& topk_ids, const Tensor& numbers_in, const Tensor& parts,
             const Tensor& send_counts_in, const Tensor& tables_in, int64_t num_experts, int64_t num_ranks,
             const Maybe& shared_row, int64_t num_shared, int64_t first_shared, int64_t home) {
  require_copies(topk_ids);
  require_dtype(send_counts_in, "send_counts", ScalarType::Int);
  require(send_counts_in.dim() == 1, "send_counts must be [P], got ", shape_text(send_counts_in));
  const Tensor ids = dense(topk_ids), numbers = dense(numbers_in), send_counts = dense(send_counts_in);
  const int64_t P = send_counts.size(0), T = ids.size(0);
  const Tables tables(tables_in, P, num_experts);
  require(tables_in.dim() == 1, "tables must be of one layer, got ", shape_text(tables_in));
  require_device(send_counts, "send_counts", ids, "topk_ids");
  require_device(tables_in, "tables", ids, "topk_ids");
  const cpu::SharedRoute shared =
      checked_shared(ids, shared_row, P, num_ranks, num_shared, first_shared, home);
  const cpu::Route in{T,
                      static_cast<int>(ids.size(1) - num_shared),
                      static_cast<int>(num_experts),
                      static_cast<int>(P),
                      tables.layer(0),
                      checked_numbers(numbers, parts, ids, num_experts + num_shared),
                      data<int32_t>(send_counts),
                      shared};
  Tensor slots = new_tensor(ids, {T, ids.size(1)}, ids.scalar_type());
  if (on_cuda(ids, [&](auto stream) {
        const Scratch scratch(ids, cuda::route_bytes(in));
        return with_ids(ids, slots, [&](auto* from, auto* to) {
          return cuda::route(in, from, to, scratch.data(), stream);
        });
      }))
    return slots;
  const cpu::ColumnsFault fault =
      with_ids(ids, slots, [&](auto* from, auto* to) { return cpu::route(in, from, to); });
  check_route(fault.routed, num_experts);
  check_shared(fault.shared, shared);
  return slots;
}

Tensor route_sampled(const Tensor& topk_ids, const Tensor& weights_in, const Tensor& tables_in,
                     int64_t num_experts, int64_t seed, const Maybe& step, int64_t rank) {
  require_columns(topk_ids, "topk_ids");
  require_dtype(weights_in, "weights", ScalarType::Float);
  require(weights_in.dim() == 1, "weights must be [P], got ", shape_text(weights_in));
  const Tensor ids = dense(topk_ids), weights = dense(weights_in);
  const Tables tables(tables_in, weights.size(0), num_experts);
  require(tables_in.dim() == 1, "tables must be of one layer, got ", shape_text(tables_in));
  Tensor slots = new_tensor(ids, {ids.size(0), ids.size(1)}, ids.scalar_type());
  require_device(weights, "weights", ids, "topk_ids");
  require_device(tables_in, "tables", ids, "topk_ids");
  require_in("rank", rank, 0, kMaxRanks - 1);
  const Stream words{static_cast<uint64_t>(seed), step_number(step, ids, "topk_ids"), static_cast<int>(rank)};
  if (on_cuda(ids, [&](auto stream) {
        return with_ids(ids, slots, [&](auto* from, auto* to) {
          return cuda::route_sampled(from, ids.numel(), num_experts, tables.layer(0), data<float>(weights),
                                     words, to, stream);
        });
      }))
    return slots;
  const cpu::RouteFault fault = with_ids(ids, slots, [&](auto* from, auto* to) {
    return cpu::route_sampled(from, ids.numel(), num_experts, tables.layer(0), data<float>(weights), words,
                              to);
  });
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
