// The exact split, nearly: replicated experts' loads moved between their copies until all ranks are level.
#pragma once

#include <utility>
#include <vector>

#include "placers/layout.h"

namespace isoload::placers {

// Levels the ranks of slots p and q with what both carry of their expert.
inline void level_pair(Layout& layout, int p, int q) {
  const Problem& problem = *layout.problem;
  const int i = layout.rank_of(p), j = layout.rank_of(q);
  const double ti = problem.tick[i], tj = problem.tick[j], both = ti + tj;
  double *own = layout.share_of(p), *other = layout.share_of(q);
  double *here = layout.load_on(i), *there = layout.load_on(j);
  for (int s = 0; s < problem.scenarios; ++s) {
    const double sum = own[s] + other[s];
    const double wish = ((there[s] + own[s]) * tj - (here[s] - own[s]) * ti) / both;
    const double part = Layout::whole(std::min(std::max(wish, 0.0), sum));
    const double moved = part - own[s];
    own[s] += moved, other[s] -= moved;
    here[s] += moved, there[s] -= moved;
  }
}

// Slots whose loads may be levelled against each other: of every replicated expert each copy with the next,
// and of more than two the last with the first. In the order of the second slot, the circles' closing pairs
// last.
using Pairs = std::vector<std::pair<int, int>>;

inline void find_pairs(const Layout& layout, Pairs& pairs) {
  std::vector<int> first(layout.problem->experts, -1), last(layout.problem->experts, -1);
  pairs.clear();
  for (int p = 0; p < static_cast<int>(layout.slot.size()); ++p) {
    const int e = layout.slot[p];
    if (e < 0) continue;
    if (last[e] >= 0)
      pairs.emplace_back(last[e], p);
    else
      first[e] = p;
    last[e] = p;
  }
  for (int e = 0; e < layout.problem->experts; ++e) {
    if (layout.copies[e] > 2) pairs.emplace_back(last[e], first[e]);
  }
}

inline void level(Layout& layout, int sweeps, const Pairs& pairs) {
  for (int sweep = 0; sweep < sweeps; ++sweep) {
    for (const auto& [p, q] : pairs) level_pair(layout, p, q);
  }
}

}  // namespace isoload::placers
