// append_shared_expert: checks of slots, weights, ranks and the layout.
#include "cpu/append_shared_expert.h"

#include <cmath>

#include "ops/op.h"

namespace isoload::ops {

// The slots per rank of the layout with n shared ones.
static int64_t checked_slots_per_rank(int64_t routed_per_rank, std::optional<int64_t> slots_per_rank,
                                      int64_t n) {
  require(routed_per_rank >= 1 && routed_per_rank <= INT32_MAX - n, "routed_per_rank must be in 1..",
          INT32_MAX - n, ", got ", routed_per_rank);
  const int64_t least = routed_per_rank + n, S = slots_per_rank.value_or(least);
  require(S >= least && S <= INT32_MAX, "slots_per_rank must be in ", least, "..2^31-1 (routed_per_rank + ",
          n, " shared), got ", S);
  return S;
}

std::tuple<Tensor, Tensor> append_shared_expert(const Tensor& slots_in, const Tensor& weights_in,
                                                const Tensor& ranks_in, int64_t routed_per_rank,
                                                std::optional<int64_t> slots_per_rank, double weight) {
  require_columns(slots_in, "slots");
  const int64_t T = slots_in.size(0), K = slots_in.size(1);
  const ScalarType real = weights_in.scalar_type();
  require(real == ScalarType::Float || real == ScalarType::Double, "weights must be float32 or float64, got ",
          dtype_name(real));
  require_shape(weights_in, "weights", {T, K});
  require_dtype(ranks_in, "ranks", ScalarType::Int);
  require(ranks_in.dim() == 2 && ranks_in.size(0) == T, "ranks must be [", T, ", n], got ",
          shape_text(ranks_in));
  const int64_t n = ranks_in.size(1);
  require(T * (K + n) <= INT32_MAX, "slots and ranks must have fewer than 2^31 copies together, got ",
          T * (K + n));
  const Tensor slots = dense(slots_in), weights = dense(weights_in), ranks = dense(ranks_in);
  const int64_t S = checked_slots_per_rank(routed_per_rank, slots_per_rank, n);
  require(std::isfinite(static_cast<float>(weight)), "weight must be a finite float32, got ", weight);

  Tensor new_slots = new_tensor(slots, {T, K + n}, slots.scalar_type());
  Tensor new_weights = torch::stable::new_empty(weights, {T, K + n});
  require_device(weights, "weights", slots, "slots");
  require_device(ranks, "ranks", slots, "slots");
  // f(what is to be done, with the types of slots and weights)
  auto with_types = [&](auto&& f) {
    return with_ids(slots, new_slots, [&](auto* from, auto* to) {
      auto run = [&](auto shared) {
        using Weight = decltype(shared);
        return f(cpu::SharedAppend<std::decay_t<decltype(*to)>, Weight>{
            from, data<Weight>(weights), data<int32_t>(ranks), T, static_cast<int>(K), static_cast<int>(n),
            routed_per_rank, S, shared, to, mutable_data<Weight>(new_weights)});
      };
      return real == ScalarType::Float ? run(static_cast<float>(weight)) : run(weight);
    });
  };
  if (on_cuda(slots, [&](auto stream) {
        return with_types([&](const auto& in) { return cuda::append_shared_expert(in, stream); });
      }))
    return {new_slots, new_weights};
  const cpu::LayoutFault fault = with_types([](const auto& in) { return cpu::append_shared_expert(in); });
  require(fault.kind != cpu::LayoutFault::bad_slot, "slots must be in -1..2^31-1, got ", fault.value);
  require(fault.kind != cpu::LayoutFault::bad_rank, "ranks must be -1 or more, got ", fault.value);
  require(fault.kind != cpu::LayoutFault::too_large, "slots_per_rank must leave every slot below 2^31, got ",
          S, ", which makes slot ", fault.value);
  return {new_slots, new_weights};
}

}  // namespace isoload::ops

ISOLOAD_OP(append_shared_expert)
