// top_up: fills the spare slots that another fill left empty, so that the split has more to choose from: the
// expert with most copies per replica goes to the least loaded live rank that lacks it and has room, where
// every expert counts as split evenly over its replicas. Ends where no expert with copies has such a rank.
//
// Copies per replica are fixed-point, rounded down; ties go to the lowest expert and rank.
#pragma once

#include <cstdint>

#include "algorithms/spare_fill.h"
#include "host_device.h"
#include "planner.h"

namespace isoload {

constexpr int kTopUpFraction = 16;  // bits behind the point
constexpr int kTopUpGroup = 16;     // experts whose hottest is kept, so that a step reads a few numbers

template <class Team>
class TopUp {
 public:
  ISOLOAD_HD TopUp(Team& team, const FillProblem& problem, const FillWorkspace& workspace,
                   const FillResult& out)
      : team_(team), in_(problem), ws_(workspace), fill_(team, in_, ws_, out) {}

  ISOLOAD_HD bool run() {
    if (!fill_.start()) return false;
    team_.for_each(in_.E, [&](int e) { ws_.key[e] = part(e, replicas(e)); });
    team_.sync();
    fill_.for_each_rank([&](int r, auto& group) {
      int64_t load = 0;
      group.for_each(in_.E, [&](int e) { load += fill_.holds(r, e) ? ws_.key[e] : 0; });
      load = group.sum(load);
      if (group.rank() == 0) ws_.load[r] = load + (int64_t(fill_.fixed(r)) << kTopUpFraction);
    });
    team_.for_each(groups(), [&](int g) { find_first(g); });
    team_.sync();
    if (team_.rank() == 0) fill();
    fill_.publish();
    return true;
  }

 private:
  ISOLOAD_HD int groups() const { return (in_.E + kTopUpGroup - 1) / kTopUpGroup; }
  ISOLOAD_HD int replicas(int e) const {
    int n = 0;
    for (int r = 0; r < in_.R; ++r) n += fill_.holds(r, e);
    return n;
  }
  ISOLOAD_HD int64_t part(int e, int n) const {
    return n > 0 ? quotient(int64_t(ws_.total[e]) << kTopUpFraction, n) : 0;
  }
  ISOLOAD_HD void find_first(int g) {
    const int end = (g + 1) * kTopUpGroup < in_.E ? (g + 1) * kTopUpGroup : in_.E;
    int first = g * kTopUpGroup;
    for (int e = first + 1; e < end; ++e)
      if (ws_.key[e] > ws_.key[first]) first = e;
    ws_.first[g] = first;
  }

  ISOLOAD_HD void fill() {
    int64_t left = 0;
    for (int r = 0; r < in_.R; ++r) left += ws_.room[r];
    while (left > 0) {
      int hottest = ws_.first[0];
      for (int g = 1; g < groups(); ++g)
        if (ws_.key[ws_.first[g]] > ws_.key[hottest]) hottest = ws_.first[g];
      if (ws_.key[hottest] <= 0) return;
      const int to = fill_.taker(hottest);
      if (to < 0)
        ws_.key[hottest] = 0;  // for good: room only shrinks
      else
        add_replica(hottest, to), --left;
      find_first(hottest / kTopUpGroup);
    }
  }

  ISOLOAD_HD void add_replica(int e, int to) {
    const int64_t before = ws_.key[e], now = part(e, replicas(e) + 1);
    for (int r = 0; r < in_.R; ++r) ws_.load[r] -= fill_.holds(r, e) ? before - now : 0;
    fill_.place(to, e);
    ws_.load[to] += now;
    ws_.key[e] = now;
  }

  Team& team_;
  const FillProblem& in_;
  const FillWorkspace& ws_;
  SpareFill<Team> fill_;
};

using TopUpPlanner = FillPlanner<TopUp, FillProblem>;  // see planner.h

}  // namespace isoload
