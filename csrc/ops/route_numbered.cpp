// route_numbered: checks of ids, numbers and share.
#include "cpu/cpu.h"
#include "ops/op.h"
#include "ops/route_checks.h"

namespace isoload::ops {

Tensor route_numbered(const Tensor& topk_ids, const Tensor& numbers_in, const Tensor& parts,
                      const Tensor& share_row_in, const Tensor& tables_in, int64_t num_experts) {
  require_copies(topk_ids);
  require_row(share_row_in);
  const Tensor ids = dense(topk_ids), numbers = dense(numbers_in), source_quota = dense(share_row_in);
  const int64_t P = source_quota.size(0), T = ids.size(0);
  const int K = static_cast<int>(ids.size(1)), E = static_cast<int>(num_experts);
  const Tables tables(tables_in, P, num_experts);
  require(tables_in.dim() == 1, "tables must be of one layer, got ", shape_text(tables_in));
  require_device(source_quota, "source_quota", ids, "topk_ids");
  require_device(tables_in, "tables", ids, "topk_ids");
  const cpu::Numbered numbered = checked_numbers(numbers, parts, ids, num_experts);
  Tensor slots = new_empty(ids, {T, ids.size(1)}, ids.scalar_type());
  auto launch = [&](auto id, auto&& run) {
    using Id = decltype(id);
    return run(data<Id>(ids), mutable_data<Id>(slots));
  };
  const bool narrow = ids.scalar_type() == ScalarType::Int;
  const int32_t* const share = data<int32_t>(source_quota);
  if (on_cuda(ids, [&](auto stream) {
        auto run = [&](const auto* from, auto* to) {
          return cuda::route_numbered(from, T, K, E, static_cast<int>(P), tables.layer(0), numbered, {},
                                      share, to, stream);
        };
        return narrow ? launch(int32_t(), run) : launch(int64_t(), run);
      }))
    return slots;
  auto run = [&](const auto* from, auto* to) {
    return cpu::route_numbered(from, T, K, E, tables.layer(0), numbered, {}, share, to);
  };
  check_route(narrow ? launch(int32_t(), run) : launch(int64_t(), run), num_experts);
  return slots;
}

}  // namespace isoload::ops

ISOLOAD_OP(route_numbered)
