// count: checks of topk_ids.
#include "cpu/cpu.h"
#include "ops/op.h"

namespace isoload::ops {

Tensor count(const Tensor& topk_ids, int64_t num_experts) {
  require_ids(topk_ids, "topk_ids");
  require(num_experts >= 1, "num_experts must be at least 1, got ", num_experts);
  const Tensor ids = dense(topk_ids);
  Tensor counts = new_empty(topk_ids, {num_experts}, ScalarType::Int);
  require(ids.numel() <= INT32_MAX, "topk_ids must have fewer than 2^31 entries, got ", ids.numel());
  const int E = static_cast<int>(num_experts);
  int32_t* const out = mutable_data<int32_t>(counts);
  const bool narrow = ids.scalar_type() == ScalarType::Int;
  if (on_cuda(ids, [&](auto stream) {
        return narrow ? cuda::count(data<int32_t>(ids), ids.numel(), E, out, stream)
                      : cuda::count(data<int64_t>(ids), ids.numel(), E, out, stream);
      }))
    return counts;
  const int64_t bad = narrow ? cpu::count(data<int32_t>(ids), ids.numel(), E, out)
                             : cpu::count(data<int64_t>(ids), ids.numel(), E, out);
  require(bad == -1, "topk_ids must be in -1..", num_experts - 1, ", got ", bad);
  return counts;
}

}  // namespace isoload::ops

ISOLOAD_OP(count)
