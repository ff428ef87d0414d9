#include <algorithm>
#include <numeric>
#include <vector>

#include "cpu/cpu.h"
#include "random_word.h"
#include "rank_set.h"

namespace isoload::cpu {
namespace {

using Ranks = RankSet<kMaxRanks / 64>;

constexpr int64_t kMinTokens = 64;  // SGLang leaves the shared copies of a smaller batch at home

// What the tokens of a batch draw from.
struct Slack {
  std::vector<int64_t> load;    // [R] what the fallback compares
  std::vector<int64_t> weight;  // [R] room below the target, the own rank preferred 11 to 10
  bool all_ranks;               // no rank is ruled out, visited or not
};

int64_t sum(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t(0));
}

Slack find_slack(const SharedDraw& in, int K) {
  Slack out{{in.load, in.load + in.R}, std::vector<int64_t>(in.R), in.rule == SharedDraw::static_};
  int64_t shared = sum(out.load) / K;  // SGLang's estimate of the tokens
  if (in.rule == SharedDraw::blog) shared = std::accumulate(in.tokens, in.tokens + in.R, int64_t(0));
  if (in.rule == SharedDraw::dynamic)
    for (int r = 0; r < in.R; ++r) out.load[r] += in.tokens[r];
  const int64_t target = (sum(out.load) + shared + in.R - 1) / in.R;
  if (in.rule == SharedDraw::dynamic)
    out.all_ranks = *std::max_element(out.load.begin(), out.load.end()) <= target;
  for (int r = 0; r < in.R; ++r) {
    const int64_t room = std::max(target - out.load[r], int64_t(0));
    if (in.rule == SharedDraw::blog)
      out.weight[r] = room * (r == in.rank ? 11 : 10);
    else
      out.weight[r] = r == in.rank ? room : room * 10 / 11;
  }
  return out;
}

int draw_rank(const Slack& slack, const Ranks& candidates, int own, uint64_t word) {
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

uint32_t hash_token(uint32_t token, uint32_t rank) {
  return (token ^ rank * 0x9E3779B9u) * 1664525u + 1013904223u;
}

}  // namespace

template <class Id>
int64_t route_shared_sampled(const Id* slots, int64_t T, int K, const SharedDraw& in, int32_t* ranks) {
  const int64_t P = int64_t(in.R) * in.slots_per_rank;
  const bool blog = in.rule == SharedDraw::blog, at_home = !blog && T < kMinTokens;
  Ranks everyone;
  for (int r = 0; r < in.R; ++r) everyone.insert(r);
  const Slack slack = K ? find_slack(in, K) : Slack();
  for (int64_t i = 0; i < T; ++i, slots += K) {
    Ranks visited;
    for (int k = 0; k < K; ++k) {
      const int64_t slot = slots[k];
      if (slot < -1 || slot >= P) return slot;
      if (slot >= 0) visited.insert(static_cast<int>(slot) / in.slots_per_rank);
    }
    if (visited.empty() || at_home) {
      ranks[i] = visited.empty() ? -1 : in.rank;
      continue;
    }
    visited.insert(in.rank);
    const uint64_t word = blog ? random_word(in.seed, i) : hash_token(static_cast<uint32_t>(i), in.rank);
    ranks[i] = draw_rank(slack, slack.all_ranks ? everyone : visited, in.rank, word);
  }
  return -1;
}

template int64_t route_shared_sampled(const int32_t*, int64_t, int, const SharedDraw&, int32_t*);
template int64_t route_shared_sampled(const int64_t*, int64_t, int, const SharedDraw&, int32_t*);

}  // namespace isoload::cpu
