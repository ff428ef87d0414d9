// append_shared_expert: checks of slots, weights, ranks and the layout.
#include <cmath>

#include "cpu/cpu.h"
#include "ops/op.h"

namespace isoload::ops {

static cpu::SharedLayout check_layout(int64_t routed_per_rank, std::optional<int64_t> slots_per_rank,
                                      double weight, int64_t n) {
  require(routed_per_rank >= 1 && routed_per_rank <= INT32_MAX - n, "routed_per_rank must be in 1..",
          INT32_MAX - n, ", got ", routed_per_rank);
  const int64_t least = routed_per_rank + n, S = slots_per_rank.value_or(least);
  require(S >= least && S <= INT32_MAX, "slots_per_rank must be in ", least, "..2^31-1 (routed_per_rank + ",
          n, " shared), got ", S);
  require(std::isfinite(static_cast<float>(weight)), "weight must be a finite float32, got ", weight);
  return {routed_per_rank, S, weight};
}

std::tuple<Tensor, Tensor> append_shared_expert(const Tensor& slots_in, const Tensor& weights_in,
                                                const Tensor& ranks_in, int64_t routed_per_rank,
                                                std::optional<int64_t> slots_per_rank, double weight) {
  require_ids(slots_in, "slots");
  require(slots_in.dim() == 2, "slots must be [T, K], got ", shape_text(slots_in));
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
  const cpu::SharedLayout layout = check_layout(routed_per_rank, slots_per_rank, weight, n);

  Tensor new_slots = new_empty(slots, {T, K + n}, slots.scalar_type());
  Tensor new_weights = torch::stable::new_empty(weights, {T, K + n});
  require_device(weights, "weights", slots, "slots");
  require_device(ranks, "ranks", slots, "slots");
  if (on_cuda(slots, [&](auto stream) {
        auto launch = [&](auto id, auto one) {
          using Id = decltype(id);
          using Weight = decltype(one);
          return cuda::append_shared_expert(data<Id>(slots), data<Weight>(weights), data<int32_t>(ranks), T,
                                            K, n, layout, mutable_data<Id>(new_slots),
                                            mutable_data<Weight>(new_weights), stream);
        };
        auto launch_as = [&](auto id) {
          return real == ScalarType::Float ? launch(id, 1.0f) : launch(id, 1.0);
        };
        return slots.scalar_type() == ScalarType::Int ? launch_as(int32_t()) : launch_as(int64_t());
      }))
    return {new_slots, new_weights};
  auto run = [&](auto id, auto one) {
    using Id = decltype(id);
    using Weight = decltype(one);
    return cpu::append_shared_expert(data<Id>(slots), data<Weight>(weights), data<int32_t>(ranks), T, K, n,
                                     layout, mutable_data<Id>(new_slots), mutable_data<Weight>(new_weights));
  };
  auto run_as = [&](auto id) { return real == ScalarType::Float ? run(id, 1.0f) : run(id, 1.0); };
  const cpu::LayoutFault fault =
      slots.scalar_type() == ScalarType::Int ? run_as(int32_t()) : run_as(int64_t());
  require(fault.kind != cpu::LayoutFault::bad_slot, "slots must be in -1..2^31-1, got ", fault.value);
  require(fault.kind != cpu::LayoutFault::bad_rank, "ranks must be -1 or more, got ", fault.value);
  require(fault.kind != cpu::LayoutFault::too_large, "slots_per_rank must leave every slot below 2^31, got ",
          layout.slots_per_rank, ", which makes slot ", fault.value);
  return {new_slots, new_weights};
}

}  // namespace isoload::ops

ISOLOAD_OP(append_shared_expert)
