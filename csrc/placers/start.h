// A first layout: how many copies each expert gets, and the heaviest first onto the rank that suits its load
// best.
#pragma once

#include <numeric>
#include <stdexcept>
#include <vector>

#include "placers/exchanges.h"

namespace isoload::placers {

// One copy each, then one more for the expert with the largest risk per copy (ties: lowest), until the room
// is full. risk [E]; at most `most` [E] copies of each, and one on a rank.
inline std::vector<int> choose_copies(const Problem& problem, const double* risk,
                                      const std::vector<int>& most) {
  const int room = std::accumulate(problem.capacity, problem.capacity + problem.ranks, 0);
  std::vector<int> copies(problem.experts, 1);
  std::vector<double> part(problem.experts);
  for (int e = 0; e < problem.experts; ++e) part[e] = most[e] > 1 ? risk[e] : -1;
  for (int left = room - problem.experts; left > 0; --left) {
    const int e = static_cast<int>(std::max_element(part.begin(), part.end()) - part.begin());
    if (part[e] < 0) break;  // all have as many as they may
    const int n = ++copies[e];
    part[e] = n < most[e] ? risk[e] / n : -1;
  }
  return copies;
}

// The rank whose load meets the expert's part least: least sum over scenarios of load times part, times the
// rank's cost (ties: lowest). Among ranks of `node` (-1: all) with room; -1 if there is none.
inline int best_rank(const Layout& layout, const std::vector<int>& filled, int e, const double* part,
                     int node) {
  const Problem& problem = *layout.problem;
  int best = -1;
  double least = 0;
  for (int r = 0; r < problem.ranks; ++r) {
    if (filled[r] == problem.capacity[r] || layout.held(r, e)) continue;
    if (node >= 0 && problem.node[r] != node) continue;
    const double* load = layout.load_on(r);
    const double meets =
        lane_sum(problem.scenarios, [&](int64_t s) { return (load[s] + part[s]) * part[s]; }) *
        problem.tick[r];
    if (best < 0 || meets < least) best = r, least = meets;
  }
  return best;
}

// Every rank with room holds e: a full rank gives an expert's slot to one with room (ties: lowest giving
// rank, its first slot, lowest taking rank). Returns the giving rank; -1 if none can.
inline int give_room(Layout& layout, std::vector<int>& filled, int e) {
  const Problem& problem = *layout.problem;
  for (int giver = 0; giver < problem.ranks; ++giver) {
    if (layout.held(giver, e)) continue;
    const int begin = giver * problem.width;
    for (int p = begin; p < begin + filled[giver]; ++p) {
      const int other = layout.slot[p];
      for (int taker = 0; taker < problem.ranks; ++taker) {
        if (filled[taker] == problem.capacity[taker] || !may_move(layout, other, giver, taker)) continue;
        exchange(layout, p, taker * problem.width + filled[taker]++);
        const int last =
            begin + --filled[giver];  // moves down, so that a rank's filled slots stay its first ones
        if (p != last) exchange(layout, p, last);
        return giver;
      }
    }
  }
  return -1;
}

// Gives the room that is left to further copies, the largest risk per copy first (ties: lowest expert).
inline void fill_room(Layout& layout, std::vector<int>& filled, const double* risk) {
  const Problem& problem = *layout.problem;
  std::vector<double> each(problem.experts), part(problem.scenarios);
  for (int e = 0; e < problem.experts; ++e) each[e] = risk[e] / layout.copies[e];
  for (;;) {
    const int e = static_cast<int>(std::max_element(each.begin(), each.end()) - each.begin());
    if (each[e] < 0) return;
    for (int s = 0; s < problem.scenarios; ++s)
      part[s] = Layout::whole(layout.load_of(e)[s] / (layout.copies[e] + 1));
    const int r = best_rank(layout, filled, e, part.data(), -1);
    if (r >= 0) {
      layout.note(r * problem.width + filled[r]++, e, 1);
      layout.split_evenly(e);
    }
    each[e] = r >= 0 ? risk[e] / layout.copies[e] : -1;  // ranks with room only get fewer
  }
}

// Lays copies [E] out: those that a node must keep first, then all others, each group the largest risk per
// copy first (ties: lowest expert). Where homes leave no rank for a further copy, other experts get its room.
inline void lay_out(Layout& layout, const std::vector<int>& copies, const double* risk) {
  const Problem& problem = *layout.problem;
  std::vector<int> order(problem.experts), filled(problem.ranks);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return risk[a] / copies[a] > risk[b] / copies[b]; });
  std::vector<double> part(problem.scenarios);
  bool left_out = false;
  auto put = [&](int e, int node) {
    for (int s = 0; s < problem.scenarios; ++s) part[s] = Layout::whole(layout.load_of(e)[s] / copies[e]);
    int r = best_rank(layout, filled, e, part.data(), node);
    if (r < 0 && node >= 0)
      throw std::invalid_argument("groups must leave room for their experts on their node");
    if (r < 0) r = give_room(layout, filled, e);
    left_out |= r < 0;  // never an expert's first copy: no rank holds it, and room was counted
    if (r < 0) return;
    const int p = r * problem.width + filled[r]++;
    layout.note(p, e, 1);
    layout.carry(p, part.data());
  };
  for (const int e : order) {
    if (problem.home[e] >= 0) put(e, problem.home[e]);
  }
  for (const int e : order) {
    for (int n = problem.home[e] >= 0 ? 1 : 0; n < copies[e]; ++n) put(e, -1);
  }
  if (!left_out) return;
  for (const int e : order) {
    if (layout.copies[e] < copies[e]) layout.split_evenly(e);
  }
  fill_room(layout, filled, risk);
}

// Takes over slots [R, width]; -1 = empty.
inline void take_over(Layout& layout, const int32_t* slots) {
  for (int p = 0; p < static_cast<int>(layout.slot.size()); ++p) {
    if (slots[p] >= 0) layout.note(p, slots[p], 1);
  }
  for (int e = 0; e < layout.problem->experts; ++e) {
    if (layout.copies[e]) layout.split_evenly(e);
  }
}

}  // namespace isoload::placers
