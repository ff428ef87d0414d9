// What the routes check alike.
#pragma once

#include "cpu/cpu.h"
#include "ops/op.h"

namespace isoload::ops {

inline void require_copies(const Tensor& topk_ids) {
  require_ids(topk_ids, "topk_ids");
  require(topk_ids.dim() == 2, "topk_ids must be [T, K], got ", shape_text(topk_ids));
  require(topk_ids.numel() <= INT32_MAX, "topk_ids must have fewer than 2^31 entries, got ",
          topk_ids.numel());
}

inline void require_row(const Tensor& source_quota) {
  require_dtype(source_quota, "source_quota", ScalarType::Int);
  require(source_quota.dim() == 1, "source_quota must be [P], got ", shape_text(source_quota));
}

inline void check_route(const cpu::RouteFault& fault, int64_t E) {
  require(fault.kind != cpu::RouteFault::bad_id, "topk_ids must be in -1..", E - 1, ", got ", fault.value);
  require(fault.kind != cpu::RouteFault::not_the_numbers,
          "numbers and parts must be those of topk_ids, as count_numbered makes them, those of expert ",
          fault.value, " are not");
  require(fault.kind != cpu::RouteFault::not_shared, "topk_ids must end in the shared experts from ", E,
          " on, or in -1 where all routed choices are, row ", fault.value, " does not");
  require(fault.kind != cpu::RouteFault::not_the_share,
          "topk_ids must hold each expert as often as its share says, ", "expert ", fault.value, " does not");
}

// parts [C, E]: a view of a wider one is as good.
inline cpu::Numbered checked_numbers(const Tensor& numbers, const Tensor& parts, const Tensor& ids,
                                     int64_t E) {
  require_dtype(numbers, "numbers", ScalarType::Int);
  require_shape(numbers, "numbers", {ids.size(0), ids.size(1)});
  require_device(numbers, "numbers", ids, "topk_ids");
  require_dtype(parts, "parts", ScalarType::Int);
  require_shape(parts, "parts", {cpu::num_parts(ids.size(0)), E});
  require_device(parts, "parts", ids, "topk_ids");
  require(E == 1 || parts.stride(1) == 1, "parts must have rows without gaps, got stride ", parts.stride(1));
  return {data<int32_t>(numbers), data<int32_t>(parts), parts.stride(0)};
}

inline void check_shared(const cpu::SharedFault& fault, const cpu::SharedRoute& problem) {
  require(fault.kind != cpu::SharedFault::bad_slot, "slots must be in -1..",
          int64_t(problem.R) * problem.S - 1, ", got ", fault.value);
  if (fault.kind == cpu::SharedFault::none) return;
  int64_t sum = 0;
  for (int64_t d = 0; d < problem.R; ++d) sum += problem.source_quota[d];
  require(false, "source_quota must sum to num_shared copies of every token with a slot, ", fault.value,
          ", got ", sum);
}

inline void require_copies_of_ranks(const Tensor& source_quota) {
  for (int64_t d = 0; d < source_quota.size(0); ++d) {
    const int32_t copies = data<int32_t>(source_quota)[d];
    require(copies >= 0, "source_quota must not be negative, got ", copies, " for rank ", d);
  }
}

}  // namespace isoload::ops
