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
    team_.for_each_group(groups(), [&](int g, auto& group) { find_first(group, g); });
    team_.sync();
    team_.alone([&](auto& group) { fill(group); });
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
  template <class Group>
  ISOLOAD_HD void find_first(const Group& group, int g) {
    const int begin = g * kTopUpGroup, here = in_.E - begin < kTopUpGroup ? in_.E - begin : kTopUpGroup;
    int first;
    group.largest(here, [&](int i) { return ws_.key[begin + i]; }, first);
    if (group.rank() == 0) ws_.first[g] = begin + first;
  }

  template <class Group>
  ISOLOAD_HD void fill(Group& group) {
    int64_t left = 0;
    group.for_each(in_.R, [&](int r) { left += ws_.room[r]; });
    for (left = group.sum(left); left > 0;) {
      int g;
      const int64_t most = group.largest(groups(), [&](int i) { return ws_.key[ws_.first[i]]; }, g);
      if (most <= 0) return;
      const int hottest = ws_.first[g], to = fill_.taker(group, hottest);
      if (to < 0) {
        if (group.rank() == 0) ws_.key[hottest] = 0;  // for good: room only shrinks
      } else {
        add_replica(group, hottest, to);
        --left;
      }
      group.sync();
      find_first(group, g);
      group.sync();
    }
  }

  template <class Group>
  ISOLOAD_HD void add_replica(Group& group, int e, int to) {
    int32_t held = 0;
    group.for_each(in_.R, [&](int r) { held += fill_.holds(r, e); });
    const int64_t before = ws_.key[e], now = part(e, group.sum32(held) + 1);
    group.sync();  // all have read what changes now
    group.for_each(in_.R, [&](int r) {
      ws_.load[r] += fill_.holds(r, e) ? now - before : r == to ? now : 0;
    });
    group.sync();
    if (group.rank() == 0) fill_.place(to, e), ws_.key[e] = now;
  }

  Team& team_;
  const FillProblem& in_;
  const FillWorkspace& ws_;
  SpareFill<Team> fill_;
};

using TopUpPlanner = FillPlanner<TopUp, FillProblem>;  // see planner.h

}  // namespace isoload
