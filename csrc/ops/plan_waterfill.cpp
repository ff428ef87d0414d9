// plan_waterfill: checks, and a batch of layers in parallel.
#include "algorithms/plan_waterfill.h"

#include "ops/op.h"
#include "ops/plan_layers.h"

namespace isoload::ops {

namespace {

// Raises what the planner refused: it only knows that something is wrong, and here there is time to look.
void explain(const WaterfillProblem& in) {
  const int64_t R = in.R;
  int64_t copies = 0;
  for (int64_t i = 0; i < R * R; ++i) {
    require(in.copies[i] >= 0, "copies must not be negative, got ", in.copies[i], " from rank ", i / R,
            " to ", i % R);
    copies += in.copies[i];
  }
  for (int64_t s = 0; s < R; ++s) {
    require(in.tokens[s] >= 0, "tokens must not be negative, got ", in.tokens[s], " for rank ", s);
    copies += int64_t(in.per_token) * in.tokens[s];
  }
  require(copies <= INT32_MAX, "copies and per_token * tokens must sum to less than 2^31 copies, got ",
          copies);
  int64_t most = 0, shared = 0;
  for (int64_t r = 0; r < R; ++r) most += in.limits[r], shared += int64_t(in.per_token) * in.tokens[r];
  require(most >= shared, "limits must hold the ", shared, " shared copies of ranks 0..", R - 1, ", got ",
          most);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> plan_waterfill(const Tensor& copies_in, const Tensor& tokens_in,
                                                  int64_t per_token, int64_t ranks_per_node,
                                                  const Maybe& ticks_in, const Maybe& limits_in) {
  require_dtype(copies_in, "copies", ScalarType::Int);
  const int64_t dims = copies_in.dim();
  require((dims == 2 || dims == 3) && copies_in.size(dims - 1) == copies_in.size(dims - 2),
          "copies must be [R, R] or [L, R, R], got ", shape_text(copies_in));
  const bool batched = dims == 3;
  const int64_t R = copies_in.size(dims - 1);
  require(R >= 1 && R <= kMaxRanks, "copies must be of 1..", kMaxRanks, " ranks, got ", R);
  const Layers layers{dense(copies_in), "copies", batched, batched ? copies_in.size(0) : 1};
  const Tensor tokens = layers.checked_per_layer(tokens_in, "tokens", {R});
  require_in("per_token", per_token, 1, 1024);
  require_per_node(ranks_per_node, R);
  const auto ticks = checked_ticks(ticks_in, R, copies_in, "copies");
  const auto limits = checked(limits_in, "limits", ScalarType::Int, {R}, copies_in, "copies");
  for (int64_t r = 0; limits && r < R && limits->is_cpu(); ++r) {
    const int32_t limit = data<int32_t>(limits)[r];
    require(limit >= 0, "limits must not be negative, got ", limit, " for rank ", r);
  }

  WaterfillProblem problem{};
  problem.R = static_cast<int>(R);
  problem.per_node = static_cast<int>(ranks_per_node);
  problem.per_token = static_cast<int32_t>(per_token);
  problem.copies = data<int32_t>(layers.like);
  problem.tokens = data<int32_t>(tokens);
  problem.ticks = data<int32_t>(ticks);
  problem.limits = data<int32_t>(limits);
  const Tensor share = layers.per_layer({R, R});
  const Tensor peak = layers.per_layer({}, ScalarType::Long), bound = layers.per_layer({}, ScalarType::Long);
  const WaterfillResult result{mutable_data<int32_t>(share), mutable_data<int64_t>(peak),
                               mutable_data<int64_t>(bound)};
  plan_layers<WaterfillPlanner>(layers.like, problem, result, layers.B, 8,
                                [](const WaterfillProblem& in, int64_t, int) { explain(in); });
  return {share, peak, bound};
}

}  // namespace isoload::ops

ISOLOAD_OP(plan_waterfill)
