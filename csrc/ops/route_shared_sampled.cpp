// route_shared_sampled: checks of slots, loads and tokens.
#include "cpu/route_shared_sampled.h"

#include "ops/op.h"
#include "rank_set.h"

namespace isoload::ops {

static SharedDraw::Rule draw_rule(const std::string& name) {
  if (name == "static") return SharedDraw::static_;
  if (name == "dynamic") return SharedDraw::dynamic;
  require(name == "blog" || name == "blog_all", "rule must be static, dynamic, blog or blog_all, got ", name);
  return name == "blog" ? SharedDraw::blog : SharedDraw::blog_all;
}

// [R] copies or tokens. One int32 per rank bounds every product and sum of the draw.
static RankLoads rank_loads(const Tensor& counts, const char* name) {
  const bool narrow = counts.scalar_type() == ScalarType::Int;
  const RankLoads loads{narrow ? data<int32_t>(counts) : nullptr, narrow ? nullptr : data<int64_t>(counts)};
  for (int r = 0; r < counts.size(0) && counts.is_cpu(); ++r)
    require(loads[r] >= 0 && loads[r] <= INT32_MAX, name, " must be in 0..2^31-1, got ", loads[r],
            " for rank ", r);
  return loads;
}

Tensor route_shared_sampled(const Tensor& slots_in, const Tensor& load_in, const Maybe& tokens_in,
                            int64_t slots_per_rank, int64_t rank, std::string rule_name, int64_t seed,
                            const Maybe& step) {
  require_columns(slots_in, "slots");
  require(slots_in.size(0) <= INT32_MAX, "slots must have fewer than 2^31 tokens, got ", slots_in.size(0));
  const SharedDraw::Rule rule = draw_rule(rule_name);
  require_ids(load_in, "load");
  require(load_in.dim() == 1 && load_in.size(0) >= 1 && load_in.size(0) <= kMaxRanks,
          "load must be [R] with R in 1..", kMaxRanks, ", got ", shape_text(load_in));
  const int64_t R = load_in.size(0);
  require_in("slots_per_rank", slots_per_rank, 1, INT32_MAX / R);
  require_in("rank", rank, 0, R - 1);
  require_device(load_in, "load", slots_in, "slots");
  Maybe tokens;
  if (rule != SharedDraw::static_) {
    require(tokens_in.has_value(), "tokens must be given for rule ", rule_name, ", got None");
    tokens = checked(tokens_in, "tokens", ScalarType::Int, {R}, slots_in, "slots");
  }

  const Tensor slots = dense(slots_in), load = dense(load_in);
  const int64_t T = slots.size(0), K = slots.size(1);
  SharedDraw draw{};
  draw.rule = rule;
  draw.R = static_cast<int>(R);
  draw.slots_per_rank = static_cast<int>(slots_per_rank);
  draw.rank = static_cast<int>(rank);
  draw.words = {static_cast<uint64_t>(seed), step_number(step, slots, "slots"), draw.rank};
  draw.load = rank_loads(load, "load");
  if (tokens) draw.tokens = rank_loads(*tokens, "tokens").narrow;
  Tensor ranks = new_tensor(slots, {T, 1});
  int32_t* const out = mutable_data<int32_t>(ranks);
  if (on_cuda(slots, [&](auto stream) {
        return with_ids(
            slots, [&](auto* from) { return cuda::route_shared_sampled(from, T, K, draw, out, stream); });
      }))
    return ranks;
  const int64_t bad =
      with_ids(slots, [&](auto* from) { return cpu::route_shared_sampled(from, T, K, draw, out); });
  require(bad == -1, "slots must be in -1..", R * slots_per_rank - 1, ", got ", bad);
  return ranks;
}

}  // namespace isoload::ops

ISOLOAD_OP(route_shared_sampled)
