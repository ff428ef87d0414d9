// spill_layer: one layer's copies before anything is lent, and what follows from them alone.
#pragma once

#include <cstdint>

#include "algorithms/spill_problem.h"
#include "host_device.h"
#include "team.h"

namespace isoload {

template <class Team>
class SpillLayer {
 protected:
  struct Mean {
    int64_t copies, live;  // of the former per live rank
  };

  ISOLOAD_HD SpillLayer(Team& team, const SpillProblem& problem, const SpillWorkspace& workspace)
      : team_(team), in_(problem), ws_(workspace) {}

  ISOLOAD_HD bool alive(int r) const { return !in_.alive || in_.alive[r]; }
  ISOLOAD_HD int32_t fixed(int r) const { return in_.fixed ? in_.fixed[r] : 0; }

  // At least 0.
  template <class F>
  ISOLOAD_HD int32_t max(int n, F&& f) {
    int32_t mine = 0;
    team_.for_each(n, [&](int i) {
      const int32_t value = f(i);
      mine = value > mine ? value : mine;
    });
    return team_.max32(mine);
  }

  // Copies per expert and per rank; refuses what is no load.
  ISOLOAD_HD SpillStatus add_up() {
    const ColumnSums seen = team_.column_sums(in_.loads, in_.num_sources, in_.E, ws_.total);
    int32_t sign = seen.any_row;
    int64_t mine = 0;
    team_.for_each(in_.R, [&](int r) { sign |= fixed(r), mine += fixed(r); });
    const int32_t fault = team_.max32(sign < 0 ? 2 : seen.any_sum < 0);
    if (fault == 2) return SpillStatus::negative;
    team_.for_each(in_.E, [&](int e) { mine += ws_.total[e]; });
    total_ = team_.sum(mine);
    return fault || total_ > INT32_MAX ? SpillStatus::too_many_copies : SpillStatus::ok;
  }

  // Notes where ranks and slots are; returns how many ranks are alive.
  ISOLOAD_HD int32_t prepare() {
    int32_t live = 0;
    team_.for_each(in_.R, [&](int r) {
      ISOLOAD_ROLLED
      for (int p = r * in_.S; p < r * in_.S + in_.S; ++p) ws_.rank[p] = r;
      ws_.node[r] = static_cast<int32_t>(uint32_t(r) / uint32_t(in_.per_node));
      ws_.free[r] = alive(r) ? in_.spare : 0, live += alive(r);
    });
    return live_ = team_.sum32(live);
  }

  // The copies as they are before anything is lent: as `start` has them, or if null all in home slots.
  ISOLOAD_HD void settle(const SpillStart& at, const int32_t* start) {
    const int P = in_.R * in_.S;
    lies_in_global(start);
    bool replica = false;
    team_.for_each(P, [&](int p) {
      const int e = in_.slot_to_expert[p];
      const bool held = e >= 0 && e < in_.E, home = held && in_.home_slot[e] == p;
      at.copies[p] = start ? start[p] : home ? ws_.total[e] : 0;
      replica |= held && !home;
    });
    team_.sync();
    const int32_t busiest = max(in_.R, [&](int r) {
      int32_t load = fixed(r);
      ISOLOAD_ROLLED
      for (int p = r * in_.S; p < r * in_.S + in_.S; ++p) load += at.copies[p];
      return at.load[r] = load;
    });
    const bool replicated = team_.max32(replica) != 0;
    const int32_t min_excess = in_.capacity_ppm ? in_.min_chunk : 1;
    view_ = {in_,           in_.R,      in_.S,     in_.per_node, in_.spare, in_.slot_to_expert,
             in_.home_slot, ws_.rank,   ws_.node,  at.copies,    at.load,   at.order,
             busiest,       replicated, min_excess};
    team_.for_each(in_.R, [&](int r) {
      const int32_t load = at.load[r];
      int before = 0;
      ISOLOAD_ROLLED
      for (int q = 0; q < r; ++q) before += at.load[q] >= load;
      ISOLOAD_ROLLED
      for (int q = r + 1; q < in_.R; ++q) before += at.load[q] > load;
      at.order[before] = r;
    });
    most_ = most_loaded();
    team_.sync();
  }

  // Copies and live ranks of the group with the largest mean, of those that lend within themselves: the
  // nodes, or all ranks.
  ISOLOAD_HD Mean most_loaded() const {
    if (!in_.within) return {total_, live_};
    Mean most{0, 1};
    ISOLOAD_ROLLED
    for (int r = 0; r < in_.R;) {
      int64_t copies = 0, live = 0;
      ISOLOAD_ROLLED
      for (const int end = r + in_.per_node; r < end; ++r) copies += view_.load[r], live += alive(r);
      if (live && copies * most.live > most.copies * live) most = {copies, live};
    }
    return most;
  }

  ISOLOAD_HD bool is_balanced() {
    if (!in_.per_expert)
      return int64_t(view_.busiest) * most_.live * kMillion <= most_.copies * in_.threshold_ppm;
    int32_t mine = 0;
    team_.for_each(in_.R, [&](int r) { mine += fixed(r); });
    const int64_t top = max(in_.E, [&](int e) { return ws_.total[e]; }),
                  of_experts = total_ - team_.sum32(mine);
    return top * in_.E * kMillion <= of_experts * in_.threshold_ppm;
  }

  // 0 where the least cost is sought.
  ISOLOAD_HD int32_t capacity_of() const {
    const uint64_t copies = (uint64_t(most_.copies * in_.capacity_ppm) + kMillion - 1) / kMillion;
    const uint64_t most = copies + uint64_t(most_.live) - 1;  // below 2^42; divided in two steps of 32 bits
    const auto live = uint32_t(most_.live), upper = uint32_t(most >> 16);
    const uint32_t rest = (upper % live) << 16 | uint32_t(most & 0xffff);
    const int64_t capacity = (int64_t(upper / live) << 16) + rest / live;
    return capacity < INT32_MAX ? capacity : INT32_MAX;
  }
  // No excess is larger than the largest number.
  ISOLOAD_HD int32_t slack_of(int32_t capacity) const {
    const uint64_t slack = uint64_t(capacity * in_.tolerance_ppm) / kMillion;
    return slack < INT32_MAX ? slack : INT32_MAX;
  }
  ISOLOAD_HD int32_t mean() const {
    return (uint32_t(most_.copies) + uint32_t(most_.live) - 1) / uint32_t(most_.live);
  }

  // The lowest level from low to high at which the ranks have room, room(level, r) in sum; `high` if none is
  // lower. Every group looks at a level of its own.
  template <class F>
  ISOLOAD_HD int32_t lowest(int32_t low, int32_t high, F&& room) {
    const int ways = team_.groups() < kSpillProbes ? 1 : kSpillProbes - 1;
    ISOLOAD_ROLLED
    while (low < high) {
      const int32_t from = low;
      const uint32_t span = high - low;
      auto level = [&](int k) -> int32_t {
        return from + (ways == 1 ? span >> 1 : uint64_t(span) * uint32_t(k + 1) / kSpillProbes);
      };
      team_.for_each_group(ways, [&](int k, auto& group) {
        const int32_t at = level(k);
        int32_t upper = 0, rest = 0;  // of the sum, which may have more than 32 bits
        group.for_each(in_.R, [&](int r) {
          const int32_t mine = room(at, r);
          upper += mine >> 16, rest += mine & 0xffff;
        });
        const int64_t left = (int64_t(group.sum32(upper)) << 16) + group.sum32(rest);
        if (group.rank() == 0) ws_.room[k] = left;
      });
      team_.sync();
      int k = 0;
      ISOLOAD_ROLLED
      while (k < ways && ws_.room[k] < 0) ++k;
      if (k < ways) high = level(k);
      if (k > 0) low = level(k - 1) + 1;
      team_.sync();  // before the next levels
    }
    return low;
  }

  Team& team_;
  const SpillProblem& in_;
  const SpillWorkspace& ws_;
  SpillView view_{};              // of the start that copies are lent from
  Mean most_{};                   // of that start
  int64_t total_ = 0, live_ = 0;  // copies; live ranks
};

}  // namespace isoload
