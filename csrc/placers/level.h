// The exact split, nearly: replicated experts' loads moved between their copies until all ranks are level.
#pragma once

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

// Every replicated expert once, its copies pair by pair in a circle; so many sweeps.
inline void level(Layout& layout, int sweeps, const std::vector<std::vector<int>>& replicated) {
  for (int sweep = 0; sweep < sweeps; ++sweep) {
    for (const auto& slots : replicated) {
      const size_t pairs = slots.size() == 2 ? 1 : slots.size();
      for (size_t k = 0; k < pairs; ++k) level_pair(layout, slots[k], slots[(k + 1) % slots.size()]);
    }
  }
}

// The slots of every expert that has more than one.
inline std::vector<std::vector<int>> replicated_slots(const Layout& layout) {
  const Problem& problem = *layout.problem;
  std::vector<std::vector<int>> found(problem.experts), many;
  for (size_t p = 0; p < layout.slot.size(); ++p) {
    if (layout.slot[p] >= 0) found[layout.slot[p]].push_back(static_cast<int>(p));
  }
  for (auto& slots : found) {
    if (slots.size() > 1) many.push_back(std::move(slots));
  }
  return many;
}

}  // namespace isoload::placers
