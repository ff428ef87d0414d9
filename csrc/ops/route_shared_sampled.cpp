// route_shared_sampled: checks of slots, loads and tokens.
#include <vector>

#include "cpu/cpu.h"
#include "ops/device.h"
#include "ops/ops.h"
#include "ops/tensors.h"
#include "rank_set.h"

namespace isoload::ops {

static cpu::SharedDraw::Rule draw_rule(const std::string& name) {
  require(name == "static" || name == "dynamic" || name == "blog",
          "rule must be static, dynamic or blog, got ", name);
  return name == "static"    ? cpu::SharedDraw::static_
         : name == "dynamic" ? cpu::SharedDraw::dynamic
                             : cpu::SharedDraw::blog;
}

// [R] copies or tokens as int64. One int32 per rank bounds every product and sum of the draw.
static std::vector<int64_t> draw_counts(const Tensor& tensor, const char* name) {
  const Tensor dense_tensor = dense(tensor);
  const bool narrow = tensor.scalar_type() == ScalarType::Int;
  std::vector<int64_t> values(tensor.numel());
  for (std::size_t r = 0; r < values.size(); ++r) {
    values[r] = narrow ? data<int32_t>(dense_tensor)[r] : data<int64_t>(dense_tensor)[r];
    require(values[r] >= 0 && values[r] <= INT32_MAX, name, " must be in 0..2^31-1, got ", values[r],
            " for rank ", r);
  }
  return values;
}

Tensor route_shared_sampled(const Tensor& slots_in, const Tensor& load_in,
                            const std::optional<Tensor>& tokens_in, int64_t slots_per_rank, int64_t rank,
                            std::string rule_name, int64_t seed) {
  require_ids(slots_in, "slots");
  require(slots_in.dim() == 2, "slots must be [T, K], got ", shape_text(slots_in));
  const cpu::SharedDraw::Rule rule = draw_rule(rule_name);
  require_ids(load_in, "load");
  require(load_in.dim() == 1 && load_in.size(0) >= 1 && load_in.size(0) <= kMaxRanks,
          "load must be [R] with R in 1..", kMaxRanks, ", got ", shape_text(load_in));
  const int64_t R = load_in.size(0);
  require(slots_per_rank >= 1 && slots_per_rank <= INT32_MAX / R, "slots_per_rank must be in 1..",
          INT32_MAX / R, ", got ", slots_per_rank);
  require(rank >= 0 && rank < R, "rank must be in 0..", R - 1, ", got ", rank);
  require_device(load_in, "load", slots_in, "slots");
  if (rule != cpu::SharedDraw::static_) {
    require(tokens_in.has_value(), "tokens must be given for rule ", rule_name, ", got None");
    require_dtype(*tokens_in, "tokens", ScalarType::Int);
    require_shape(*tokens_in, "tokens", {R});
    require_device(*tokens_in, "tokens", slots_in, "slots");
  }

  const Tensor slots = dense(slots_in);
  const int64_t T = slots.size(0), K = slots.size(1);
  cpu::SharedDraw draw{
      rule,    static_cast<int>(R),        static_cast<int>(slots_per_rank), static_cast<int>(rank), nullptr,
      nullptr, static_cast<uint64_t>(seed)};
  Tensor ranks = new_empty(slots, {T, 1});
  if (on_cuda(slots, [&](auto stream) {
        const bool drawn_from = rule != cpu::SharedDraw::static_;
        const Tensor loads = dense(load_in), tokens = drawn_from ? dense(*tokens_in) : loads;
        const bool narrow = loads.scalar_type() == ScalarType::Int;
        const cuda::RankLoads read{narrow ? data<int32_t>(loads) : nullptr,
                                   narrow ? nullptr : data<int64_t>(loads)};
        auto launch = [&](auto id) {
          return cuda::route_shared_sampled(data<decltype(id)>(slots), T, K, draw, read,
                                            drawn_from ? data<int32_t>(tokens) : nullptr,
                                            mutable_data<int32_t>(ranks), stream);
        };
        return slots.scalar_type() == ScalarType::Int ? launch(int32_t()) : launch(int64_t());
      }))
    return ranks;
  const std::vector<int64_t> load = draw_counts(load_in, "load");
  std::vector<int64_t> tokens;
  if (rule != cpu::SharedDraw::static_) tokens = draw_counts(*tokens_in, "tokens");
  draw.load = load.data(), draw.tokens = tokens.data();
  const int64_t bad =
      slots.scalar_type() == ScalarType::Int
          ? cpu::route_shared_sampled(data<int32_t>(slots), T, K, draw, mutable_data<int32_t>(ranks))
          : cpu::route_shared_sampled(data<int64_t>(slots), T, K, draw, mutable_data<int32_t>(ranks));
  require(bad == -1, "slots must be in -1..", R * slots_per_rank - 1, ", got ", bad);
  return ranks;
}

}  // namespace isoload::ops
