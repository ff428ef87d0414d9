// plan_fill: spare slots take experts of overloaded ranks for one batch. The split over the filled slots is
// plan_exact's; here copies only say which experts go where.
//
// A level is a load that no rank should pass (fill_level.h). The lowest one is tried first, then up to five
// higher ones. The cheapest is kept; if none costs less than no import at all, nothing is imported. Integers
// only, ties go to the lowest rank, then slot.
#pragma once

#include <cstdint>

#include "algorithms/fill_level.h"
#include "algorithms/fill_problem.h"
#include "host_device.h"
#include "planner.h"
#include "team.h"

namespace isoload {

template <class Team>
class LevelFill {
 public:
  ISOLOAD_HD LevelFill(Team& team, const LevelFillProblem& problem, const LevelFillWorkspace& workspace,
                       const FillResult& out)
      : team_(team), in_(problem), ws_(workspace), out_(out) {}

  // False: the loads are no loads, or no rank is alive.
  ISOLOAD_HD bool run() {
    if (!add_up()) return false;
    put_copies();
    const Mean most = most_loaded();
    const bool balanced = is_balanced(most);
    if (!balanced) {
      const FillQueue queue = queue_up(capacity(most));
      team_.alone([&](auto& group) { search(group, queue); });
    }
    team_.for_each(in_.R, [&](int r) {
      ISOLOAD_ROLLED
      for (int i = 0; i < in_.spare && !balanced; ++i)
        if (const int e = ws_.best[r * in_.spare + i]; e >= 0)
          out_.slot_to_expert[(r + 1) * in_.S - in_.spare + i] = e;
    });
    count_imports(team_, in_, out_, ws_.owner, ws_.exported,
                  balanced ? int32_t(kBelowThreshold) : *ws_.flags);
    return true;
  }

 private:
  struct Mean {
    int64_t copies, live;  // of the former per live rank
  };

  ISOLOAD_HD bool alive(int r) const { return !in_.alive || in_.alive[r]; }
  ISOLOAD_HD int32_t fixed(int r) const { return in_.fixed ? in_.fixed[r] : 0; }

  // Copies per expert, and of all. False for what is no load.
  ISOLOAD_HD bool add_up() {
    const ColumnSums seen = team_.column_sums(in_.loads, in_.num_sources, in_.E, ws_.total);
    int32_t sign = seen.any_row, live = 0;
    int64_t mine = 0;
    team_.for_each(in_.R, [&](int r) { sign |= fixed(r), mine += fixed(r), live += alive(r); });
    const int32_t fault = team_.max32(sign < 0 || seen.any_sum < 0);
    fixed_ = team_.sum(mine), live_ = team_.sum32(live);
    mine = 0;
    team_.for_each(in_.E, [&](int e) { mine += ws_.total[e]; });
    total_ = fixed_ + team_.sum(mine);
    return fault == 0 && total_ <= INT32_MAX && live_ > 0;
  }

  // Where copies are before any import, and which rank has which expert.
  ISOLOAD_HD void put_copies() {
    team_.for_each(in_.E, [&](int e) { ws_.owner[e] = -1; });
    team_.sync();
    int32_t busiest = 0, replica = 0;
    team_.for_each(in_.R, [&](int r) {
      int32_t load = fixed(r);
      ISOLOAD_ROLLED
      for (int p = r * in_.S; p < r * in_.S + in_.S; ++p) {
        const int e = in_.slot_to_expert[p];
        const bool routed = e >= 0 && e < in_.E, home = routed && in_.home_slot[e] == p;
        if (home) ws_.owner[e] = r;
        replica |= routed && !home;
        ws_.rank[p] = r, out_.slot_to_expert[p] = e;
        load += ws_.copies[p] = in_.start ? in_.start[p] : home ? ws_.total[e] : 0;
      }
      ws_.first_load[r] = load;
      busiest = load > busiest ? load : busiest;
    });
    busiest_ = team_.max32(busiest), replicated_ = team_.max32(replica) != 0;
    if (!replicated_) return;
    team_.for_each(in_.E * in_.R, [&](int i) { ws_.holds[i] = false; });
    team_.sync();
    team_.for_each(in_.R, [&](int r) {  // a rank may have two slots of an expert
      ISOLOAD_ROLLED
      for (int p = r * in_.S; p < r * in_.S + in_.S; ++p)
        if (const int e = in_.slot_to_expert[p]; e >= 0 && e < in_.E)
          ws_.holds[int64_t(e) * in_.R + r] = true;
    });
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
      for (const int end = r + in_.per_node; r < end; ++r) copies += ws_.first_load[r], live += alive(r);
      if (live && copies * most.live > most.copies * live) most = {copies, live};
    }
    return most;
  }

  ISOLOAD_HD bool is_balanced(const Mean& most) {
    if (!in_.per_expert) return int64_t(busiest_) * most.live * kMillion <= most.copies * in_.threshold_ppm;
    int32_t top = 0;
    team_.for_each(in_.E, [&](int e) { top = ws_.total[e] > top ? ws_.total[e] : top; });
    return int64_t(team_.max32(top)) * in_.E * kMillion <= (total_ - fixed_) * in_.threshold_ppm;
  }

  // Rounded up; what no rank can have is cut.
  ISOLOAD_HD int32_t capacity(const Mean& most) const {
    const int64_t copies = quotient_of_large(most.copies * in_.capacity_ppm + kMillion - 1, kMillion);
    const int64_t level = quotient_of_large(copies + most.live - 1, most.live);
    return static_cast<int32_t>(level < INT32_MAX ? level : INT32_MAX);
  }

  // The slots whose copies may leave at any level, in order: no level is below the lowest.
  ISOLOAD_HD FillQueue queue_up(int32_t low) {
    const int P = in_.R * in_.S;
    auto leaves = [&](int p) {
      return ws_.copies[p] > 0 && ws_.first_load[ws_.rank[p]] - low >= in_.min_chunk &&
             ws_.owner[in_.slot_to_expert[p]] >= 0;
    };
    team_.for_each(P, [&](int p) { ws_.index[p] = leaves(p); });
    const int n = team_.scan(ws_.index, P);
    team_.for_each(P, [&](int p) {
      if (leaves(p)) ws_.slots[ws_.index[p]] = p, ws_.rests[ws_.index[p]] = ws_.copies[p];
    });
    team_.sync();
    team_.for_each(n, [&](int i) {  // sorted by counting: needs no other lane
      const int32_t mine = ws_.rests[i];
      int before = 0;
      ISOLOAD_ROLLED
      for (int k = 0; k < i; ++k) before += ws_.rests[k] >= mine;
      ISOLOAD_ROLLED
      for (int k = i + 1; k < n; ++k) before += ws_.rests[k] > mine;
      ws_.queue[before] = ws_.slots[i];
    });
    team_.sync();
    return {n, low, busiest_, replicated_};
  }

  // Without prices the lowest level that is reached is the cheapest. With prices a higher level has fewer
  // imports: the search goes up while that pays. Every level costs the lowest prices besides, so that none
  // within these of the cheapest can pay.
  template <class Group>
  ISOLOAD_HD void search(Group& group, const FillQueue& queue) const {
    FillLevel<Group> attempt(group, in_, ws_, queue);
    const int32_t in = in_.near_import < in_.far_import ? in_.near_import : in_.far_import;
    const int32_t out = in_.near_export < in_.far_export ? in_.near_export : in_.far_export;
    int64_t least = queue.busiest, low = queue.low, high = least - in - out;
    group.for_each(in_.R * in_.spare, [&](int i) { ws_.best[i] = -1; });
    const bool priced = (in_.near_import | in_.far_import | in_.near_export | in_.far_export) != 0;
    const uint32_t parts = priced ? 8 : 3;
    bool reached = queue.busiest - low < in_.min_chunk;
    ISOLOAD_ROLLED
    for (int i = 0; i < kFillLevels && high - low >= in_.min_chunk && (high - low) * kFillFine > low; ++i) {
      const int64_t level = low + (i ? static_cast<uint32_t>(high - low) / parts : 0);
      const auto got = attempt.run(static_cast<int32_t>(level));
      const bool met = got.peak - level < in_.min_chunk, better = got.cost < least;
      if (better) {
        least = got.cost, reached = met && i == 0;
        if (least - in - out < high) high = least - in - out;
        group.for_each(in_.R * in_.spare, [&](int k) { ws_.best[k] = ws_.lent[k]; });
      }
      if (met && !(priced && better))
        high = level < high ? level : high;
      else
        low = level + 1;
      attempt.undo();
    }
    if (group.rank() == 0) *ws_.flags = reached ? 0 : kAboveCapacity;
  }

  Team& team_;
  const LevelFillProblem& in_;
  const LevelFillWorkspace& ws_;
  const FillResult& out_;
  int64_t total_ = 0, fixed_ = 0, live_ = 0;  // copies; those that cannot move; live ranks
  int32_t busiest_ = 0;                       // largest load before any import
  bool replicated_ = false;
};

struct LevelFillPlanner : PlannerOf<LevelFillProblem, FillResult> {  // see planner.h
  ISOLOAD_HD static void select(Problem& in, FillResult& out, int64_t b) {
    in.select(b);
    if (in.start) in.start += b * in.R * in.S;
    out.select(in, b);
  }
  template <int W>
  ISOLOAD_HD static int64_t bytes(const Problem& in) {
    return LevelFillWorkspace::bytes(in.R, in.E, int64_t(in.R) * in.S, in.spare);
  }
  template <int W, class Team>
  ISOLOAD_HD static int solve(Team& team, const Problem& in, void* memory, const FillResult& out) {
    const auto workspace = LevelFillWorkspace::at(memory, in.R, in.E, int64_t(in.R) * in.S, in.spare);
    return LevelFill<Team>(team, in, workspace, out).run() ? kPlanned : 0;
  }
  template <class Team>
  ISOLOAD_HD static void refuse(Team& team, const Problem& in, const FillResult& out) {
    refuse_fill(team, in, out);
  }

  // Plain: all copies begin in home slots, no dead ranks, no nodes that lend within themselves.
  ISOLOAD_HD static bool is_plain(const Problem& in) {
    return in.start == nullptr && in.alive == nullptr && !in.within;
  }
  template <bool kPlain>
  ISOLOAD_HD static void prepare(Problem& in) {
    if (kPlain) in.start = nullptr, in.alive = nullptr, in.within = false;
    lies_in_global(in.loads), lies_in_global(in.fixed), lies_in_global(in.alive);
  }
  template <class Take>
  ISOLOAD_HD static void fetched(Problem& in, FillResult&, Take&& take) {
    take(in.slot_to_expert, int64_t(in.R) * in.S), take(in.home_slot, in.E);
  }
};

}  // namespace isoload
