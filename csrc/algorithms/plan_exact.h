// plan_exact: split every replicated expert's copies so that the busiest rank carries as little as integers
// allow.
//
// The problem is a flow: rank r carries its fixed and solo load plus its part of each replicated expert. For
// a set S of ranks, everything that can only be computed inside S must fit there, so the peak is at least
// load(S) / |S|; the largest such value is the optimum (max-flow = min-cut). The solver finds both sides:
//   start     every replicated expert evenly over its replicas, or as another objective wants it (start.h)
//   sweeps    over-relaxed pair balancing, class by class: cheap, removes nearly all of the imbalance
//   augment   shortest paths on ranks from an overloaded to an underloaded one, moving whole copies
//   certify   no path left: the ranks reachable from the overloaded ones are such an S; its bound is the next
//             target (discrete Newton from below), and the flow found so far stays
// `pour` copies may follow that go to any rank, e.g. those of shared experts. They add load to the set of all
// ranks only, so the joint optimum is the larger of this split's and the level at which all ranks together
// have room for everything; no split need be better than that level, so it is the first target.
//
// The peak never rises above where it is or the target, so the work may be cut anywhere; the bound is always
// true. Integers only, ties go to the lowest rank, then the lowest expert in `order`: the same quota on every
// rank, team and device.
#pragma once

#include <climits>
#include <cstdint>
#include <type_traits>

#include "algorithms/balance.h"
#include "algorithms/plan_exact_parts.h"
#include "algorithms/plan_exact_paths.h"
#include "algorithms/plan_exact_warp_paths.h"
#include "algorithms/start.h"
#include "host_device.h"
#include "planner.h"
#include "rank_set.h"

namespace isoload {

// kSpread: the objective is spread, and no other's code is compiled.
template <int W, class Team, bool kSpread = false>
class ExactSolver {
 public:
  ISOLOAD_HD ExactSolver(Team& team, const ExactProblem& problem, ExactWorkspace<W> workspace, int32_t* quota)
      : team_(team), in_(problem), t_(problem.tables), ws_(workspace), quota_(quota) {}

  // Whether there is a plan: not of loads that are negative, too many or of an expert without a replica.
  ISOLOAD_HD bool solve(const ExactResult& out) {
    if (!add_up()) return false;
    start();
    int32_t sweeps = 0;
    const int64_t target = with_tolerance(bound_, in_.tolerance_ppm);
    while (sweeps < in_.sweeps && is_above(target)) {
      sweep(sweeps > 0);
      ++sweeps;
    }
    PathsFound found{bound_, 0, 0, false};  // lane 0's, if a group augments
    if constexpr (W == 1)
      team_.alone([&](auto& group) { found = augment_by(group, found); });  // a level is a few words
    else
      found = augment_by(team_, found);
    const int64_t routed = peak(), reached = routed > level_ ? routed : level_;
    if (team_.rank() == 0) {
      *out.peak = reached;
      *out.bound = found.bound;
      const int32_t telemetry[4] = {sweeps, found.paths, found.steps, found.cut};
      for (int i = 0; i < 4; ++i) out.telemetry[i] = telemetry[i];
    }
    team_.sync();
    return true;
  }

 private:
  ISOLOAD_HD int64_t cost(int r) const {
    return in_.ticks ? int64_t(in_.ticks[r]) * ws_.load[r] : ws_.load[r];
  }
  ISOLOAD_HD int64_t peak() {
    if (W == 1 && !in_.ticks) {  // in half the words
      int32_t most = 0;
      team_.for_each(in_.R, [&](int r) { most = ws_.load[r] > most ? ws_.load[r] : most; });
      return team_.max32(most);
    }
    int64_t top = 0;
    team_.for_each(in_.R, [&](int r) { top = cost(r) > top ? cost(r) : top; });
    return team_.max(top);
  }

  ISOLOAD_HD bool is_above(int64_t target) {
    bool above = false;
    team_.for_each(in_.R, [&](int r) { above |= cost(r) > target; });
    return team_.any_lane(above);
  }

  // Totals per expert, fixed and solo load per rank, the first lower bound; refuses what cannot be planned.
  ISOLOAD_HD bool add_up() {
    const int R = in_.R, E = in_.E, S = in_.S;
    const int32_t pour = in_.pour ? *in_.pour : 0;
    const ColumnSums seen = team_.column_sums(in_.loads, in_.num_sources, E, ws_.total);
    bool refused = (pour | seen.any_row | seen.any_sum) < 0;
    int64_t copies = 0;
    team_.for_each(in_.fixed ? R : 0, [&](int r) {
      copies += in_.fixed[r];
      refused |= in_.fixed[r] < 0;
    });
    team_.for_each(E, [&](int e) {  // the lane's own sums
      copies += ws_.total[e];
      refused |= ws_.total[e] != 0 && t_.copies(e) == 0;
    });
    copies = team_.sum(refused ? kTooMany : copies);
    if (copies + pour > INT32_MAX) return false;
    team_.for_each_group(R, [&](int r, auto& group) {
      int32_t solo = 0;
      group.for_each(S, [&](int s) {
        const int p = r * S + s;
        const int32_t q = t_.solo[p] >= 0 ? ws_.total[t_.solo[p]] : 0;
        quota_[p] = q;
        solo += q;
      });
      solo = group.sum32(solo);
      if (group.rank() == 0) ws_.load[r] = solo + (in_.fixed ? in_.fixed[r] : 0);
    });
    team_.for_each(t_.num_split(), [&](int i) {
      const int e = t_.order[i];
      ws_.split.first[i] = t_.offsets[e], ws_.split.last[i] = t_.offsets[e + 1];
      ws_.split.copies[i] = ws_.total[e];
    });
    level_ = smallest_peak(team_, in_.ticks, R, copies + pour, R, RankSet<W>::first(R), ws_.found);
    team_.sync();
    const int64_t top = peak();
    bound_ = top > level_ ? top : level_;
    return true;
  }

  // Not inlined: two starts inside solve() make the augmenting loop there slower.
  ISOLOAD_HD ISOLOAD_COLD void start() {
    Start<Team> start{team_, t_, ws_.total, ws_.load, quota_};
    if constexpr (!kSpread)
      if (in_.objective == Objective::local) return start.local(in_.loads, in_.R, in_.E, in_.per_node);
    start.spread();
  }

  template <class Lanes>
  ISOLOAD_HD PathsFound augment_by(Lanes& lanes, PathsFound found) {
    if constexpr (W == 1 && Lanes::Warp::kLanes > 1) {
      if (WarpPaths<Lanes, 1>::takes(in_)) return augment_in_registers<1>(lanes, found);
      if (WarpPaths<Lanes, 2>::takes(in_)) return augment_in_registers<2>(lanes, found);
    }
    using Kept = std::conditional_t<kSpread, Sides<W>&, Sides<W>>;
    Sides<W> sides;
    ExactPaths<W, Lanes, Kept> paths(lanes, in_, ws_, quota_, sides);
    return augment(paths, in_, found);
  }
  template <int kOwn, class Group>
  ISOLOAD_HD PathsFound augment_in_registers(Group& group, PathsFound found) {
    WarpPaths<Group, kOwn> paths(group, in_, ws_, quota_);
    found = augment(paths, in_, found);
    paths.finish();
    return found;
  }

  // f(first, n): the replicated experts, class by class. Meanwhile an expert's ranks are its own.
  template <class F>
  ISOLOAD_HD void class_by_class(F&& f) {
    const int num_classes = t_.num_classes();
    for (int k = 0, first = 0; k < num_classes; ++k) {
      const int end = t_.classes[k + 1];
      f(first, end - first);
      first = end;
      team_.sync();
    }
  }

  ISOLOAD_HD void sweep(bool again) {
    if constexpr (Team::Warp::kLanes > 1)
      if (!in_.ticks) return sweep_by_groups(again);
    class_by_class(
        [&](int first, int n) { balance(team_, t_, ws_.split.from(first), n, in_.ticks, ws_.load, quota_); });
  }

  // A group has every groups()-th expert. It reads what it needs of its next one while others balance theirs,
  // and begins with the set of ranks that it found the last time.
  ISOLOAD_HD void sweep_by_groups(bool again) {
    typename Team::Warp group;
    const uint32_t inverse = Divisor(group.rank() + 1).inverse;
    const Replicated& split = ws_.split;
    const int n = t_.num_split();
    int i = team_.group();
    auto level_of = [&](int i) {
      if (i >= n) return Level();
      Level level = Level::of(group, t_, split.first[i], split.last[i] - split.first[i], split.copies[i],
                              quota_, inverse);
      if (again && level.copies > 2) level.in = ws_.level_in[i];
      return level;
    };
    Level own = level_of(i);
    ISOLOAD_ROLLED
    for (int k = 0, num_classes = t_.num_classes(); k < num_classes; ++k) {
      const int end = t_.classes[k + 1];
      bool done = false;  // with `own`
      ISOLOAD_ROLLED
      for (; i < end; i += team_.groups()) {
        if (done) own = level_of(i);
        if (own.copies == 2) {
          balance_pair(group, own, ws_.load, quota_);
        } else {
          balance_level(group, t_, own, ws_.load, quota_);
          group.sync();  // all have read it
          if (group.rank() == 0) ws_.level_in[i] = own.in;
        }
        done = true;
      }
      team_.sync();
      if (done) own = level_of(i);
    }
  }

  Team& team_;
  const ExactProblem& in_;
  const ReplicaTables t_;
  const ExactWorkspace<W> ws_;
  int32_t* const quota_;
  int64_t bound_ = 0, level_ = 0;  // level_: the least peak if every copy could be anywhere
};

struct ExactPlanner : PlannerOf<ExactProblem, ExactResult, true> {  // see planner.h
  ISOLOAD_HD static void select(Problem& in, Result& out, int64_t b) {
    in.SplitProblem::select(b);
    if (in.fixed) in.fixed += b * in.R;
    if (in.pour) in.pour += b;
    out.select(b, int64_t(in.R) * in.S);
  }
  template <int W>
  ISOLOAD_HD static int64_t bytes(const Problem& in) {
    return ExactWorkspace<W>::bytes(in.R, in.E);
  }
  template <int W, class Team>
  ISOLOAD_HD static int solve(Team& team, const Problem& in, void* memory, const Result& out) {
    ExactSolver<W, Team> solver(team, in, ExactWorkspace<W>::at(memory, in.R, in.E), out.quota);
    return solver.solve(out) ? kPlanned : 0;
  }
  template <class Team>
  ISOLOAD_HD static void refuse(Team& team, const Problem& in, const Result& out) {
    out.refuse(team, in.R * in.S);
  }

  // Plain: ranks of equal speed, no other start.
  ISOLOAD_HD static bool is_plain(const Problem& in) {
    return in.ticks == nullptr && in.objective == Objective::spread;
  }
  template <bool kPlain>
  ISOLOAD_HD static void prepare(Problem& in) {
    if (kPlain) in.ticks = nullptr, in.objective = Objective::spread;
    lies_in_global(in.ticks);
  }
  template <class Take>
  ISOLOAD_HD static void fetched(Problem& in, Result& out, Take&& take) {
    const int64_t E = in.E, P = int64_t(in.R) * in.S;
    take(in.loads, in.num_sources * E), in.tables.fetched(E, P, take), take(out.quota, P);
    take(in.fixed, in.R, kOrNone), take(in.pour, 1, kOrNone);
  }
};

}  // namespace isoload
