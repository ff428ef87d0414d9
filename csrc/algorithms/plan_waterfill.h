// plan_waterfill: pour the copies of the shared experts over the ranks' routed loads so that the busiest rank
// carries as little as integers allow, moving as few copies as that takes, most of them to where their
// tokens go anyway.
//
//   level   the lowest peak P under which all shared copies fit: no split of them can do better
//   keep    every rank keeps what fits under P; only its excess moves, and only to ranks with room left
//   visit   most of the excess goes to ranks that its tokens visit anyway (visit_flow.h)
//   rest    what is left goes inside its node, then anywhere, as two number lines overlap
//
// Maximal: the kept copies; of the excess the part in `visit`; of what that leaves, the part inside a node.
// Not joined: another maximum flow might leave more for the node, and home never gives way to let another
// rank's copies in. Integers only, ties go to the lowest rank: the same share on every rank, team and device.
#pragma once

#include <climits>
#include <cstdint>
#include <type_traits>

#include "algorithms/least_level.h"
#include "algorithms/quotient.h"
#include "algorithms/visit_flow.h"
#include "host_device.h"
#include "planner.h"
#include "rank_set.h"
#include "team.h"

namespace isoload {

enum class WaterfillStatus : int32_t { ok = 0, negative = 1, too_many_copies = 2, beyond_limits = 3 };

struct WaterfillProblem {
  int R, per_node;        // ranks, ranks of a node
  int32_t per_token;      // shared experts: copies per token
  const int32_t* copies;  // [R, R] routed copies that source s sends to rank d
  const int32_t* tokens;  // [R] tokens of source s that need the shared experts
  const int32_t* ticks;   // [R] cost of one copy on a rank, 1..2^20, or null: all 1
  const int32_t* limits;  // [R] most shared copies of a rank, or null
};

struct WaterfillResult {
  int32_t* share;  // [R, R] shared copies that source s sends to rank d
  int64_t* peak;   // [1] largest rank cost (copies, or ticks if given)
  int64_t* bound;  // [1] lower bound of the peak over all shares
};

template <int W>
struct WaterfillWorkspace : Workspace<WaterfillWorkspace<W>> {  // R here: places<W>(R)
  VisitWorkspace<W> visit;
  int32_t *base, *excess, *room;  // [R] routed copies; shared copies without a place; places without a copy
  int32_t *excess_left, *room_left;  // [R] the same after a pour

  template <class Take>
  ISOLOAD_HD void lay_out(int64_t num_ranks, Take&& take) {
    const int64_t R = places<W>(num_ranks);
    visit.lay_out(num_ranks, take);
    take(R, base, excess, room, excess_left, room_left);
  }
};

template <int W, class Team>
class Waterfill {
 public:
  ISOLOAD_HD Waterfill(Team& team, const WaterfillProblem& problem, WaterfillWorkspace<W> workspace,
                       const WaterfillResult& out)
      : team_(team), in_(problem), ws_(workspace), share_(out.share), out_(out) {}

  ISOLOAD_HD WaterfillStatus solve() {
    const WaterfillStatus status = add_up();
    if (status != WaterfillStatus::ok) return status;
    const int64_t level = find_level();
    if (level < 0) return WaterfillStatus::beyond_limits;
    pour_to(level);
    if (team_.rank() == 0) *out_.peak = *out_.bound = level;  // without it a lower level would have done
    team_.sync();
    return WaterfillStatus::ok;
  }

  // The share alone, where the caller has the rest: the level, `base` in the workspace, all shared copies.
  ISOLOAD_HD void solve_at(int64_t level, int64_t shared) {
    shared_ = shared;
    pour_to(level);
  }

  ISOLOAD_HD int paths() const { return paths_; }  // augmentations of the last solve

 private:
  // Shared copies of a source; add_up() saw that they fit.
  ISOLOAD_HD int32_t own(int s) const { return in_.per_token * in_.tokens[s]; }
  ISOLOAD_HD int32_t& share(int s, int d) { return share_[int64_t(s) * in_.R + d]; }
  ISOLOAD_HD int64_t tick(int r) const { return in_.ticks ? in_.ticks[r] : 1; }
  ISOLOAD_HD int32_t limit(int r) const { return in_.limits ? in_.limits[r] : INT32_MAX; }
  // Shared copies of a rank that carries so many copies in all.
  ISOLOAD_HD int64_t room(int r, int64_t copies) const {
    const int64_t left = copies - ws_.base[r];
    return left < limit(r) ? left : limit(r);
  }

  template <class F>
  ISOLOAD_HD int64_t sum(F&& f) {
    int64_t mine = 0;
    team_.for_each(in_.R, [&](int r) { mine += f(r); });
    return team_.sum(mine);
  }

  // Routed copies per rank; refuses what cannot be planned.
  ISOLOAD_HD WaterfillStatus add_up() {
    const ColumnSums seen = team_.column_sums(in_.copies, in_.R, in_.R, ws_.base);
    int32_t sign = seen.any_row;
    team_.for_each(in_.R, [&](int s) { sign |= in_.tokens[s]; });
    if (team_.any(sign < 0)) return WaterfillStatus::negative;
    routed_ = sum([&](int r) { return ws_.base[r]; });
    shared_ = sum([&](int s) { return int64_t(in_.per_token) * in_.tokens[s]; });
    const bool fits = routed_ + shared_ <= INT32_MAX && !team_.any(seen.any_sum < 0);
    return fits ? WaterfillStatus::ok : WaterfillStatus::too_many_copies;
  }

  // The level, -1 if the limits hold too little.
  ISOLOAD_HD int64_t find_level() {
    int64_t top = 0;
    team_.for_each(in_.R, [&](int r) {
      const int64_t cost = tick(r) * ws_.base[r];
      top = cost > top ? cost : top;
    });
    top = team_.max(top);
    if (!in_.ticks && !in_.limits) {  // every rank has room up to the mean
      const int64_t mean = rounded_up(routed_ + shared_, in_.R);
      return top > mean ? top : mean;
    }
    if (in_.limits && sum([&](int r) { return limit(r); }) < shared_) return -1;
    int64_t level = 0;
    team_.for_each_by(
        1, [](int) { return true; }, [](int) {},
        [&](int, auto& group) {
          level = least_level(
              group, LevelProblem{in_.R, in_.ticks, top, routed_ + shared_, shared_},
              [](int) { return true; }, [&](int r, int64_t copies) { return room(r, copies); });
        });
    return team_.max(level);
  }

  ISOLOAD_HD void pour_to(int64_t level) {
    keep(level);
    visit();
    for (int size = in_.per_node;; size = in_.R) {
      pour(size);
      if (size == in_.R) break;
    }
  }

  ISOLOAD_HD void keep(int64_t level) {
    team_.for_each(in_.R, [&](int s) {
      const int64_t most = room(s, in_.ticks ? quotient(level, in_.ticks[s]) : level);
      const int32_t capacity = most < INT32_MAX ? static_cast<int32_t>(most) : INT32_MAX, mine = own(s);
      const int32_t kept = mine < capacity ? mine : capacity;
      ws_.excess[s] = mine - kept;
      ws_.room[s] = capacity - kept < shared_ ? capacity - kept : static_cast<int32_t>(shared_);
      ISOLOAD_ROLLED
      for (int d = 0; d < in_.R; ++d) share(s, d) = 0;
      share(s, s) = kept;
      givers_.insert_if(mine > kept, s);
      takers_.insert_if(capacity > kept, s);
    });
    unite(team_, givers_);
    unite(team_, takers_);
  }

  ISOLOAD_HD void visit() {
    const VisitProblem problem{in_.R, in_.per_token, in_.copies, in_.tokens};
    team_.alone([&](auto& group) {  // a step is a few words: what there is to do lies between its barriers
      VisitFlow<W, std::decay_t<decltype(group)>> flow(group, problem, ws_.visit, givers_, takers_,
                                                       ws_.excess, ws_.room, share_);
      paths_ = flow.run();  // lane 0's
    });
  }

  // Rest

  // In every group of `size` ranks: excess and room laid end to end in rank order, each giver sends to the
  // places beside it, as far as the shorter line goes. No group is left with both.
  ISOLOAD_HD void pour(int size) {
    int32_t any = 0;
    team_.for_each(in_.R, [&](int r) { any |= ws_.excess[r]; });
    if (!team_.any_lane(any != 0)) return;
    team_.for_each(in_.R, [&](int r) {
      const int first = r / size * size;
      int32_t before = 0, left = ws_.excess[r], wanted = 0, start = 0;  // of all excess < 2^31
      ISOLOAD_ROLLED
      for (int s = first; s < r; ++s) before += ws_.excess[s];
      ISOLOAD_ROLLED
      for (int d = first; d < first + size; ++d) {
        const int32_t room = ws_.room[d], place = room > before ? room - before : 0,
                      sent = left < place ? left : place;
        before = room < before ? before - room : 0;
        share(r, d) += sent;
        left -= sent;
        if (d < r) start = room < INT32_MAX - start ? start + room : INT32_MAX;
        wanted += ws_.excess[d];
      }
      wanted = wanted > start ? wanted - start : 0;
      ws_.excess_left[r] = left;
      ws_.room_left[r] = ws_.room[r] > wanted ? ws_.room[r] - wanted : 0;
    });
    team_.sync();
    team_.for_each(in_.R, [&](int r) {
      ws_.excess[r] = ws_.excess_left[r];
      ws_.room[r] = ws_.room_left[r];
    });  // the next one begins with a sum over what each lane wrote
  }

  Team& team_;
  const WaterfillProblem& in_;
  const WaterfillWorkspace<W> ws_;
  int32_t* const share_;
  const WaterfillResult& out_;
  int paths_ = 0;
  int64_t routed_ = 0, shared_ = 0;  // all routed and shared copies
  RankSet<W> givers_, takers_;       // ranks that keep less than they have; that have room besides
};

struct WaterfillPlanner : PlannerOf<WaterfillProblem, WaterfillResult, true> {  // see planner.h
  ISOLOAD_HD static void select(Problem& in, Result& out, int64_t b) {
    const int64_t R = in.R;
    in.copies += b * R * R;
    in.tokens += b * R;
    out = {out.share + b * R * R, out.peak + b, out.bound + b};
  }
  template <int W>
  ISOLOAD_HD static int64_t bytes(const Problem& in) {
    return WaterfillWorkspace<W>::bytes(in.R);
  }
  template <int W, class Team>
  ISOLOAD_HD static int solve(Team& team, const Problem& in, void* memory, const Result& out) {
    Waterfill<W, Team> solver(team, in, WaterfillWorkspace<W>::at(memory, in.R), out);
    const WaterfillStatus status = solver.solve();
    return status == WaterfillStatus::ok ? kPlanned : static_cast<int>(status);
  }
  template <class Team>
  ISOLOAD_HD static void refuse(Team& team, const Problem& in, const Result& out) {
    team.for_each(in.R * in.R, [&](int i) { out.share[i] = 0; });
    if (team.rank() == 0) *out.peak = *out.bound = -1;
  }
};

}  // namespace isoload
