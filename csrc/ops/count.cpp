// count, count_numbered and count_columns: checks of topk_ids.
#include <tuple>

#include "cpu/cpu.h"
#include "ops/op.h"

namespace isoload::ops {

namespace {

// The ids [n] of a count, checked.
Tensor checked_ids(const Tensor& topk_ids, int64_t num_experts) {
  require_ids(topk_ids, "topk_ids");
  require(num_experts >= 1, "num_experts must be at least 1, got ", num_experts);
  require(topk_ids.numel() <= INT32_MAX, "topk_ids must have fewer than 2^31 entries, got ",
          topk_ids.numel());
  return dense(topk_ids);
}

void check_value(int64_t bad, int64_t num_experts) {
  require(bad == -1, "topk_ids must be in -1..", num_experts - 1, ", got ", bad);
}

}  // namespace

Tensor count(const Tensor& topk_ids, int64_t num_experts) {
  const Tensor ids = checked_ids(topk_ids, num_experts);
  Tensor counts = new_empty(topk_ids, {num_experts}, ScalarType::Int);
  const int E = static_cast<int>(num_experts);
  int32_t* const out = mutable_data<int32_t>(counts);
  const bool narrow = ids.scalar_type() == ScalarType::Int;
  if (on_cuda(ids, [&](auto stream) {
        return narrow ? cuda::count(data<int32_t>(ids), ids.numel(), E, out, stream)
                      : cuda::count(data<int64_t>(ids), ids.numel(), E, out, stream);
      }))
    return counts;
  check_value(narrow ? cpu::count(data<int32_t>(ids), ids.numel(), E, out)
                     : cpu::count(data<int64_t>(ids), ids.numel(), E, out),
              num_experts);
  return counts;
}

std::tuple<Tensor, Tensor, Tensor> count_numbered(const Tensor& topk_ids, int64_t num_experts) {
  const Tensor ids = checked_ids(topk_ids, num_experts);
  require(ids.dim() == 2, "topk_ids must be [T, K], got ", shape_text(ids));
  const int64_t T = ids.size(0);
  const int K = static_cast<int>(ids.size(1)), E = static_cast<int>(num_experts);
  Tensor counts = new_empty(ids, {num_experts}), numbers = new_empty(ids, {T, ids.size(1)}),
         parts = new_empty(ids, {cpu::num_parts(T), num_experts});
  int32_t *const out = mutable_data<int32_t>(counts), *const of = mutable_data<int32_t>(numbers),
                 *const rows = mutable_data<int32_t>(parts);
  const bool narrow = ids.scalar_type() == ScalarType::Int;
  if (on_cuda(ids, [&](auto stream) {
        return narrow ? cuda::count_numbered(data<int32_t>(ids), T, K, E, out, of, rows, stream)
                      : cuda::count_numbered(data<int64_t>(ids), T, K, E, out, of, rows, stream);
      }))
    return {counts, numbers, parts};
  check_value(narrow ? cpu::count_numbered(data<int32_t>(ids), T, K, E, out, of, rows)
                     : cpu::count_numbered(data<int64_t>(ids), T, K, E, out, of, rows),
              num_experts);
  return {counts, numbers, parts};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> count_columns(const Tensor& topk_ids, int64_t num_routed,
                                                         int64_t num_shared) {
  require(num_routed >= 1, "num_routed must be at least 1, got ", num_routed);
  require(num_shared >= 1 && num_shared <= 1024, "num_shared must be in 1..1024, got ", num_shared);
  const Tensor ids = checked_ids(topk_ids, num_routed);
  require(ids.dim() == 2, "topk_ids must be [T, K], got ", shape_text(ids));
  const int64_t T = ids.size(0), width = ids.size(1) + num_shared, num_experts = num_routed + num_shared;
  require(T * width <= INT32_MAX, "topk_ids must have fewer than 2^31 entries with num_shared=", num_shared,
          " more columns, got ", T * width);
  const int K = static_cast<int>(ids.size(1)), routed = static_cast<int>(num_routed),
            shared = static_cast<int>(num_shared);
  Tensor columns = new_empty(ids, {T, width}, ids.scalar_type()), counts = new_empty(ids, {num_experts}),
         numbers = new_empty(ids, {T, width}), parts = new_empty(ids, {cpu::num_parts(T), num_experts});
  int32_t *const out = mutable_data<int32_t>(counts), *const of = mutable_data<int32_t>(numbers),
                 *const rows = mutable_data<int32_t>(parts);
  auto launch = [&](auto&& run) {
    if (ids.scalar_type() == ScalarType::Int) return run(data<int32_t>(ids), mutable_data<int32_t>(columns));
    return run(data<int64_t>(ids), mutable_data<int64_t>(columns));
  };
  if (!on_cuda(ids, [&](auto stream) {
        return launch([&](const auto* from, auto* to) {
          return cuda::count_columns(from, T, K, routed, shared, to, out, of, rows, stream);
        });
      }))
    check_value(launch([&](const auto* from, auto* to) {
                  return cpu::count_columns(from, T, K, routed, shared, to, out, of, rows);
                }),
                num_routed);
  return {columns, counts, numbers, parts};
}

}  // namespace isoload::ops

ISOLOAD_OP(count)
ISOLOAD_OP(count_numbered)
ISOLOAD_OP(count_columns)
