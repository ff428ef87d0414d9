// route_shared_sampled: a lane per token; every block works out the slack of all ranks for itself, which
// costs less than a launch.
#include "cuda/cuda.h"
#include "cuda/launch.cuh"
#include "random_word.h"
#include "rank_set.h"

namespace isoload::cuda {
namespace {

constexpr int kWarps = 8;
using Team = BlockTeam<kWarps>;
constexpr int64_t kMinTokens = 64;  // SGLang leaves the shared copies of a smaller batch at home

struct Slack {
  int64_t *load, *weight;  // [R] what the fallback compares; room below the target, the own rank preferred
  bool all_ranks;          // no rank is ruled out, visited or not
};

// memory: 2 * R words.
__device__ Slack find_slack(Team& team, const SharedDraw& in, int K, const RankLoads& load,
                            const int32_t* tokens, int64_t* memory) {
  Slack out{memory, memory + in.R, in.rule == SharedDraw::static_};
  auto sum = [&](auto&& f) {
    int64_t mine = 0;
    team.for_each(in.R, [&](int r) { mine += f(r); });
    return team.sum(mine);
  };
  const int64_t routed = sum([&](int r) { return load[r]; });
  int64_t shared = routed / K;  // SGLang's estimate of the tokens
  if (in.rule == SharedDraw::blog) shared = sum([&](int r) { return int64_t(tokens[r]); });
  int64_t top = INT64_MIN, all = 0;
  team.for_each(in.R, [&](int r) {
    out.load[r] = load[r] + (in.rule == SharedDraw::dynamic ? tokens[r] : 0);
    top = out.load[r] > top ? out.load[r] : top;
    all += out.load[r];
  });
  top = team.max(top), all = team.sum(all);
  const int64_t target = (all + shared + in.R - 1) / in.R;
  if (in.rule == SharedDraw::dynamic) out.all_ranks = top <= target;
  team.for_each(in.R, [&](int r) {
    const int64_t room = target > out.load[r] ? target - out.load[r] : 0;
    if (in.rule == SharedDraw::blog)
      out.weight[r] = room * (r == in.rank ? 11 : 10);
    else
      out.weight[r] = r == in.rank ? room : room * 10 / 11;
  });
  team.sync();
  return out;
}

template <int W>
__device__ int draw_rank(const Slack& slack, const RankSet<W>& candidates, int own, uint64_t word) {
  int64_t total = 0;
  candidates.for_each([&](int r) { total += slack.weight[r]; });
  int chosen = -1;
  if (total > 0) {
    int64_t left = static_cast<int64_t>(word % static_cast<uint64_t>(total));
    candidates.for_each([&](int r) {
      if (chosen < 0 && left < slack.weight[r]) chosen = r;
      left -= slack.weight[r];
    });
    return chosen;
  }
  chosen = own;
  candidates.for_each([&](int r) {
    if (slack.load[r] * 11 < slack.load[chosen] * 10) chosen = r;
  });
  return chosen;
}

__device__ uint32_t hash_token(uint32_t token, uint32_t rank) {
  return (token ^ rank * 0x9E3779B9u) * 1664525u + 1013904223u;
}

template <int W, class Id>
__global__ void __launch_bounds__(Team::kLanes, 1)
    route_shared_sampled_kernel(const Id* slots, int64_t T, int K, SharedDraw in, RankLoads load,
                                const int32_t* tokens, int32_t* ranks, int32_t* errors) {
  __shared__ Team::Group group;
  Team team(group);
  auto* const memory = reinterpret_cast<int64_t*>(shared_memory);
  const Slack slack = find_slack(team, in, K > 0 ? K : 1, load, tokens, memory);
  const int64_t i = int64_t(blockIdx.x) * Team::kLanes + threadIdx.x, P = int64_t(in.R) * in.slots_per_rank;
  if (i >= T) return;
  RankSet<W> visited, everyone;
  for (int k = 0; k < K; ++k) {
    const int64_t slot = slots[i * K + k];
    if (slot >= 0 && slot < P)
      visited.insert(static_cast<int>(slot) / in.slots_per_rank);
    else if (slot != -1)
      report(errors, kSharedSampledSlot);
  }
  const bool blog = in.rule == SharedDraw::blog;
  if (visited.empty() || (!blog && T < kMinTokens)) {
    ranks[i] = visited.empty() ? -1 : in.rank;
    return;
  }
  visited.insert(in.rank);
  for (int r = 0; slack.all_ranks && r < in.R; ++r) everyone.insert(r);
  const uint64_t word = blog ? random_word(in.seed, i) : hash_token(static_cast<uint32_t>(i), in.rank);
  ranks[i] = draw_rank(slack, slack.all_ranks ? everyone : visited, in.rank, word);
}

}  // namespace

template <class Id>
const char* route_shared_sampled(const Id* slots, int64_t T, int K, const SharedDraw& draw,
                                 const RankLoads& load, const int32_t* tokens, int32_t* ranks, void* stream) {
  return with_words(draw.R, [&](auto W) {
    return launch(route_shared_sampled_kernel<W, Id>, (T + Team::kLanes - 1) / Team::kLanes, Team::kLanes,
                  2 * draw.R * int64_t(sizeof(int64_t)), stream, slots, T, K, draw, load, tokens, ranks,
                  error_word());
  });
}

template const char* route_shared_sampled(const int32_t*, int64_t, int, const SharedDraw&, const RankLoads&,
                                          const int32_t*, int32_t*, void*);
template const char* route_shared_sampled(const int64_t*, int64_t, int, const SharedDraw&, const RankLoads&,
                                          const int32_t*, int32_t*, void*);

}  // namespace isoload::cuda
