// One layer of the placer `scenario`: several starts, a search from each, and the best of all.
#pragma once

#include "placers/search.h"

namespace isoload::placers {

struct Starts {
  const double* risks;   // [num_risks, stride] a start each: copies by the risk of an expert
  int num_risks;
  size_t stride;         // between the risks of a layer
  const int32_t* rival;  // [R, width] a placement that the result is never worse than; or null
};

inline double search_from(const Problem& problem, Layout& layout, const Limits& limits) {
  layout.problem = &problem;
  return Search(layout, limits).run();
}

// With an exact split only the two starts that level best, each the end of a search with an even split, are searched on.
inline void search_exactly(const Problem& problem, std::vector<Layout>& layouts, std::vector<double>& found,
                           const Limits& limits) {
  Limits none = limits;
  none.steps = 0;
  std::vector<size_t> order(layouts.size());
  std::iota(order.begin(), order.end(), 0);
  for (const size_t i : order) {
    Layout levelled = layouts[i];
    found[i] = search_from(problem, levelled, none);
  }
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return found[a] < found[b]; });
  for (size_t i = 0; i < order.size() && i < 2; ++i) found[order[i]] = search_from(problem, layouts[order[i]], limits);
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
  std::vector<Layout> layouts(starts.num_risks, Layout(even));
  std::vector<double> found(starts.num_risks);
  for (int i = 0; i < starts.num_risks; ++i) {
    const double* risk = starts.risks + starts.stride * i;
    lay_out(layouts[i], choose_copies(even, risk), risk);
    found[i] = search_from(even, layouts[i], limits);
  }
  if (problem.exact) search_exactly(problem, layouts, found, limits);
  for (int i = 0; i < starts.num_risks; ++i) keep(layouts[i], found[i]);
  if (starts.rival) {
    Layout layout(problem);
    take_over(layout, starts.rival);
    Limits none = limits;
    none.steps = 0;
    if (least < 0 || search_from(problem, layout, none) < least) keep(layout, search_from(problem, layout, limits));
  }
  return least;
}

}  // namespace isoload::placers
