// One layer of the placer `scenario`: several starts, a search from each, and the best of all.
#pragma once

#include "placers/search.h"

namespace isoload::placers {

struct Starts {
  const double* risks;  // [num_risks, stride] a start each: copies by the risk of an expert
  int num_risks;
  size_t stride;         // between the risks of a layer
  const int32_t* rival;  // [R, width] a placement that the result is never worse than; or null
};

inline double search_from(const Problem& problem, Layout& layout, const Limits& limits) {
  layout.problem = &problem;
  return Search(layout, limits).run();
}

// A layout by risk. With few slots on a rank the heaviest copies fill whole ranks, and fewer copies of one
// expert may leave room for those of single ones: all smaller numbers are tried, the most copied experts
// first, the best is taken, and so on until none helps.
inline Layout start_by_risk(const Problem& problem, const double* risk, bool few_slots) {
  int tries = few_slots ? 64 : 0;
  const int open = open_ranks(problem.capacity, problem.ranks);
  Layout best(problem);
  lay_out(best, choose_copies(problem, risk, std::vector<int>(problem.experts, open)), risk);
  double least = best.objective();
  for (bool better = true; better && tries > 0;) {
    better = false;
    const std::vector<int> copies = best.copies;
    std::vector<int> most = copies, order(problem.experts);
    for (int& n : most) n = n > 1 ? n : open;
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return copies[a] > copies[b]; });
    for (const int e : order) {
      for (int n = copies[e] - 1; n >= 1 && tries > 0; --n, --tries) {
        std::vector<int> fewer = most;
        fewer[e] = n;
        Layout layout(problem);
        lay_out(layout, choose_copies(problem, risk, fewer), risk);
        const double found = layout.objective();
        if (found < least) least = found, best = layout, better = true;
      }
    }
  }
  return best;
}

// Fills slots [R, width] and returns the objective.
inline double plan_layer(const Problem& problem, const Starts& starts, const Limits& limits, int32_t* slots) {
  double least = -1;
  auto keep = [&](const Layout& layout, double found) {
    if (least >= 0 && found >= least) return;
    least = found;
    std::copy(layout.slot.begin(), layout.slot.end(), slots);
  };
  if (limits.before) {
    Layout layout(problem);
    take_over(layout, limits.before);
    keep(layout, search_from(problem, layout, limits));
    return least;
  }
  Problem even = problem;
  even.exact = false;
  for (int i = 0; i < starts.num_risks; ++i) {
    const double* risk = starts.risks + starts.stride * i;
    Layout layout = start_by_risk(even, risk, limits.few_slots && limits.steps > 0);
    double found = search_from(even, layout, limits);
    if (problem.exact)
      found = search_from(problem, layout, limits);  // from where the even split's search ends
    keep(layout, found);
  }
  if (starts.rival) {
    Layout layout(problem);
    take_over(layout, starts.rival);
    Limits none = limits;
    none.steps = 0;
    if (least < 0 || search_from(problem, layout, none) < least)
      keep(layout, search_from(problem, layout, limits));
  }
  return least;
}

}  // namespace isoload::placers
