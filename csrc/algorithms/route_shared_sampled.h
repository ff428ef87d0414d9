// route_shared_sampled: each token draws the rank of its shared copies among those that it visits and its
// own, with weights that every rank knows: the room that ranks have below the mean.
//
// The rules are SGLang's static and dynamic ones and the one of its blog (papers/001), integers only.
#pragma once

#include <cstdint>

#include "host_device.h"
#include "random_word.h"
#include "rank_set.h"

namespace isoload {

// [R] copies per rank, as int32 or int64.
struct RankLoads {
  const int32_t* narrow;
  const int64_t* wide;
  ISOLOAD_HD int64_t operator[](int r) const { return wide ? wide[r] : narrow[r]; }
};

// One source rank's draw of shared ranks.
struct SharedDraw {
  enum Rule { static_, dynamic, blog, blog_all } rule;
  int R, slots_per_rank, rank;
  RankLoads load;         // routed copies
  const int32_t* tokens;  // [R], null for static_
  Stream words;           // the blog's

  // The blog's formula, with either set of candidates: visited ranks and the own one, or all.
  ISOLOAD_HD bool of_blog() const { return rule == blog || rule == blog_all; }
  // SGLang leaves the shared copies of a smaller batch at home.
  ISOLOAD_HD bool at_home(int64_t num_tokens) const { return !of_blog() && num_tokens < 64; }
};

// What the tokens of a batch draw from.
struct SharedSlack {
  int64_t* load;    // [R] what the fallback compares
  int64_t* weight;  // [R] room below the target, the own rank preferred 11 to 10
  bool all_ranks;   // no rank is ruled out, visited or not
};

// memory: [2, R]. A barrier last.
template <class Team>
ISOLOAD_HD SharedSlack find_slack(Team& team, const SharedDraw& in, int K, int64_t* memory) {
  SharedSlack out{memory, memory + in.R, in.rule == SharedDraw::static_ || in.rule == SharedDraw::blog_all};
  auto sum = [&](auto&& f) {
    int64_t mine = 0;
    team.for_each(in.R, [&](int r) { mine += f(r); });
    return team.sum(mine);
  };
  int64_t shared =
      sum([&](int r) { return in.load[r]; }) / (K > 0 ? K : 1);  // SGLang's estimate of the tokens
  if (in.of_blog()) shared = sum([&](int r) { return int64_t(in.tokens[r]); });
  int64_t top = INT64_MIN, all = 0;
  team.for_each(in.R, [&](int r) {
    out.load[r] = in.load[r] + (in.rule == SharedDraw::dynamic ? in.tokens[r] : 0);
    top = out.load[r] > top ? out.load[r] : top;
    all += out.load[r];
  });
  top = team.max(top), all = team.sum(all);
  const int64_t target = (all + shared + in.R - 1) / in.R;
  if (in.rule == SharedDraw::dynamic) out.all_ranks = top <= target;
  team.for_each(in.R, [&](int r) {
    const int64_t room = target > out.load[r] ? target - out.load[r] : 0;
    if (in.of_blog())
      out.weight[r] = room * (r == in.rank ? 11 : 10);
    else
      out.weight[r] = r == in.rank ? room : room * 10 / 11;
  });
  team.sync();
  return out;
}

// In proportion to the weights; -1 where all are 0.
template <int W>
ISOLOAD_HD int draw_rank(const SharedSlack& slack, const RankSet<W>& candidates, uint64_t word) {
  int64_t total = 0;
  candidates.for_each([&](int r) { total += slack.weight[r]; });
  if (total == 0) return -1;
  int chosen = -1;
  int64_t left = static_cast<int64_t>(word % static_cast<uint64_t>(total));
  candidates.for_each([&](int r) {
    if (chosen < 0 && left < slack.weight[r]) chosen = r;
    left -= slack.weight[r];
  });
  return chosen;
}

// SGLang's random word of a token.
ISOLOAD_HD inline uint32_t hash_token(uint32_t token, uint32_t rank) {
  return (token ^ rank * 0x9E3779B9u) * 1664525u + 1013904223u;
}

// The rank of token i, whose slots [K] lead to `visited`: -1 if none. Where no candidate has a weight, the
// own rank is replaced by each candidate that carries less than 10/11 of the one before: for visited ranks of
// SGLang's dynamic rule in the order of the slots, else in rank order.
template <int W, class Id>
ISOLOAD_HD int draw_shared(const SharedDraw& in, const SharedSlack& slack, int64_t num_tokens, int64_t i,
                           RankSet<W> visited, const Id* slots, int K) {
  if (visited.empty()) return -1;
  if (in.at_home(num_tokens)) return in.rank;
  visited.insert(in.rank);
  const uint64_t word =
      in.of_blog() ? random_word(in.words.key(), i) : hash_token(static_cast<uint32_t>(i), in.rank);
  const RankSet<W> candidates = slack.all_ranks ? RankSet<W>::first(in.R) : visited;
  int chosen = draw_rank(slack, candidates, word);
  if (chosen >= 0) return chosen;
  chosen = in.rank;
  auto compare = [&](int r) {
    if (slack.load[r] * 11 < slack.load[chosen] * 10) chosen = r;
  };
  if (in.of_blog() || slack.all_ranks)
    candidates.for_each(compare);
  else
    for (int k = 0; k < K; ++k)
      if (slots[k] >= 0) compare(static_cast<int>(slots[k]) / in.slots_per_rank);
  return chosen;
}

}  // namespace isoload
