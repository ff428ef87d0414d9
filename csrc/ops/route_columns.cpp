// route_columns: checks of ids, numbers and shares.
#include "cpu/cpu.h"
#include "ops/op.h"
#include "ops/route_checks.h"

namespace isoload::ops {

namespace {

// Where the shared copies go: home, or as row [R] of their share says.
cpu::SharedRoute checked_shared(const Tensor& ids, const std::optional<Tensor>& row, int64_t P,
                                int64_t num_ranks, int64_t num_shared, int64_t first_shared, int64_t home,
                                bool strict) {
  const int64_t T = ids.size(0), width = ids.size(1), R = num_ranks;
  require(num_shared >= 1 && num_shared <= 1024, "num_shared must be in 1..1024, got ", num_shared);
  require(width >= num_shared, "topk_ids must be [T, K + ", num_shared, "], got ", shape_text(ids));
  require(R >= 1 && R <= kMaxRanks && P % R == 0, "num_ranks must divide ", P, " slots and be in 1..",
          kMaxRanks, ", got ", R);
  const int64_t most = P / R - num_shared;
  require(first_shared >= 0 && first_shared <= most, "first_shared must be in 0..", most,
          " with num_shared=", num_shared, ", got ", first_shared);
  require(home >= 0 && home < R, "home must be in 0..", R - 1, ", got ", home);
  if (row) {
    require_dtype(*row, "shared_row", ScalarType::Int);
    require_shape(*row, "shared_row", {R});
    require_device(*row, "shared_row", ids, "topk_ids");
    require(row->is_contiguous(), "shared_row must have no gaps");
    if (ids.is_cpu()) require_copies_of_ranks(*row);
  }
  return {T,
          static_cast<int>(width - num_shared),
          static_cast<int>(R),
          static_cast<int>(P / R),
          static_cast<int>(home),
          static_cast<int>(num_shared),
          row ? data<int32_t>(*row) : nullptr,
          strict,
          static_cast<int>(width),
          static_cast<int>(width),
          static_cast<int>(first_shared)};
}

}  // namespace

Tensor route_columns(const Tensor& topk_ids, const Tensor& numbers_in, const Tensor& parts,
                     const Tensor& share_row_in, const Tensor& tables_in, int64_t num_experts,
                     const std::optional<Tensor>& shared_row, int64_t num_ranks, int64_t num_shared,
                     int64_t first_shared, int64_t home, bool strict) {
  require_copies(topk_ids);
  require_row(share_row_in);
  const Tensor ids = dense(topk_ids), numbers = dense(numbers_in), source_quota = dense(share_row_in);
  const int64_t P = source_quota.size(0);
  const int E = static_cast<int>(num_experts);
  const Tables tables(tables_in, P, num_experts);
  require(tables_in.dim() == 1, "tables must be of one layer, got ", shape_text(tables_in));
  require_device(source_quota, "source_quota", ids, "topk_ids");
  require_device(tables_in, "tables", ids, "topk_ids");
  const cpu::SharedRoute shared =
      checked_shared(ids, shared_row, P, num_ranks, num_shared, first_shared, home, strict);
  const cpu::Numbered numbered = checked_numbers(numbers, parts, ids, num_experts + num_shared);
  Tensor slots = new_empty(ids, {shared.T, ids.size(1)}, ids.scalar_type());
  auto launch = [&](auto id, auto&& run) {
    using Id = decltype(id);
    return run(data<Id>(ids), mutable_data<Id>(slots));
  };
  const bool narrow = ids.scalar_type() == ScalarType::Int;
  const int32_t* const share = data<int32_t>(source_quota);
  if (on_cuda(ids, [&](auto stream) {
        const Scratch scratch(ids, cuda::route_columns_bytes(shared));
        auto run = [&](const auto* from, auto* to) {
          return cuda::route_columns(from, E, tables.layer(0), numbered, shared, share, to, scratch.data(),
                                     stream);
        };
        return narrow ? launch(int32_t(), run) : launch(int64_t(), run);
      }))
    return slots;
  auto run = [&](const auto* from, auto* to) {
    return cpu::route_columns(from, E, tables.layer(0), numbered, shared, share, to);
  };
  const cpu::ColumnsFault fault = narrow ? launch(int32_t(), run) : launch(int64_t(), run);
  check_route(fault.routed, num_experts);
  check_shared(fault.shared, shared);
  return slots;
}

}  // namespace isoload::ops

ISOLOAD_OP(route_columns)
