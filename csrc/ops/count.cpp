// count: checks of topk_ids.
#include "cpu/count.h"

#include <tuple>

#include "ops/op.h"

namespace isoload::ops {

std::tuple<Tensor, Tensor, Tensor, Tensor> count(const Tensor& topk_ids, int64_t num_experts,
                                                 int64_t num_shared) {
  require_columns(topk_ids, "topk_ids");
  require(num_experts >= 1, "num_experts must be at least 1, got ", num_experts);
  require_in("num_shared", num_shared, 0, 1024);
  const int64_t T = topk_ids.size(0), width = topk_ids.size(1) + num_shared, all = num_experts + num_shared;
  require(T * width <= INT32_MAX, "topk_ids must have fewer than 2^31 entries, its num_shared=", num_shared,
          " more columns included, got ", T * width);
  const Tensor ids = dense(topk_ids);
  const int K = static_cast<int>(ids.size(1)), E = static_cast<int>(num_experts),
            n = static_cast<int>(num_shared);
  Tensor counts = new_tensor(ids, {all}), numbers = new_tensor(ids, {T, width}),
         parts = new_tensor(ids, {cpu::num_parts(T), all}),
         columns = new_tensor(ids, {n > 0 ? T : 0, n > 0 ? width : 0}, ids.scalar_type());
  const cpu::Counts out{mutable_data<int32_t>(counts), mutable_data<int32_t>(numbers),
                        mutable_data<int32_t>(parts)};
  if (!on_cuda(ids, [&](auto stream) {
        return with_ids(ids, columns,
                        [&](auto* from, auto* to) { return cuda::count(from, T, K, E, n, to, out, stream); });
      })) {
    const int64_t bad =
        with_ids(ids, columns, [&](auto* from, auto* to) { return cpu::count(from, T, K, E, n, to, out); });
    require(bad == -1, "topk_ids must be in -1..", num_experts - 1, ", got ", bad);
  }
  return {columns, counts, numbers, parts};
}

}  // namespace isoload::ops

ISOLOAD_OP(count)
