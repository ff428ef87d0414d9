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

#include "algorithms/balance.h"
#include "algorithms/plan_exact_parts.h"
#include "algorithms/start.h"
#include "host_device.h"
#include "planner.h"
#include "rank_set.h"

namespace isoload {

template <int W, class Team>
class ExactSolver {
 public:
  ISOLOAD_HD ExactSolver(Team& team, const ExactProblem& problem, ExactWorkspace<W> workspace, int32_t* quota)
      : team_(team), in_(problem), t_(problem.tables), ws_(workspace), quota_(quota) {}

  ISOLOAD_HD PlanStatus solve(const ExactResult& out) {
    const PlanStatus status = add_up();
    if (status != PlanStatus::ok) return status;
    start();
    int32_t sweeps = 0, paths = 0, steps = 0;
    int64_t target = with_tolerance(bound_);
    while (sweeps < in_.sweeps && peak() > target) {
      sweep();
      ++sweeps;
    }
    aim(target);
    if (!over_.empty()) list_ranks();
    bool cut = false;
    while (!over_.empty()) {
      const int depth = find_levels();
      if (depth < 0) {
        bound_ = certify();
        aim(target = with_tolerance(bound_));
        ++steps;
      } else if (paths >= in_.budget) {
        cut = true;
        break;
      } else {
        augment(depth);
        ++paths;
      }
    }
    finish();
    const int64_t routed = peak(), reached = routed > level_ ? routed : level_;
    if (team_.rank() == 0) {
      *out.peak = reached;
      *out.bound = bound_;
      const int32_t telemetry[4] = {sweeps, paths, steps, cut};
      for (int i = 0; i < 4; ++i) out.telemetry[i] = telemetry[i];
    }
    team_.sync();
    return PlanStatus::ok;
  }

 private:
  ISOLOAD_HD int64_t cost(int r) const {
    return in_.ticks ? int64_t(in_.ticks[r]) * ws_.load[r] : ws_.load[r];
  }
  ISOLOAD_HD int expert(int i) const { return t_.order[i]; }

  ISOLOAD_HD int64_t peak() {
    int64_t top = 0;
    team_.for_each(in_.R, [&](int r) { top = cost(r) > top ? cost(r) : top; });
    return team_.max(top);
  }

  ISOLOAD_HD int64_t with_tolerance(int64_t bound) const {
    const int64_t million = 1000000;  // in two parts, so that nothing overflows
    return bound + bound / million * in_.tolerance_ppm + bound % million * in_.tolerance_ppm / million;
  }

  // Totals per expert, fixed and solo load per rank, the first lower bound; refuses what cannot be planned.
  ISOLOAD_HD PlanStatus add_up() {
    const int R = in_.R, E = in_.E, S = in_.S;
    int64_t copies = 0, covered = 0;
    const int32_t pour = in_.pour ? *in_.pour : 0;
    int32_t sign = pour, wrapped = 0;
    team_.for_each(E, [&](int e) { sign |= ws_.total[e] = in_.loads[e]; });
    for (int s = 1; s < in_.num_sources;
         ++s) {  // row by row; a lane keeps its experts, so no barrier between
      const int32_t* row = in_.loads + int64_t(s) * E;
      team_.for_each(E, [&](int e) {
        sign |= row[e];
        wrapped |= ws_.total[e] = static_cast<int32_t>(uint32_t(ws_.total[e]) + uint32_t(row[e]));
      });
    }
    team_.for_each(in_.fixed ? R : 0, [&](int r) {
      copies += in_.fixed[r];
      covered += in_.fixed[r];
      sign |= in_.fixed[r];
    });
    if (team_.any(sign < 0)) return PlanStatus::negative_load;
    team_.for_each(E, [&](int e) {
      copies += ws_.total[e];
      covered += t_.copies(e) > 0 ? ws_.total[e] : 0;
    });
    copies = team_.sum(copies);
    if (team_.any(wrapped < 0) || copies + pour > INT32_MAX) return PlanStatus::too_many_copies;
    if (team_.sum(covered) != copies) return PlanStatus::expert_without_replica;
    int64_t top = 0;
    team_.for_each(R, [&](int r) {
      int32_t load = in_.fixed ? in_.fixed[r] : 0;
      for (int p = r * S; p < r * S + S; ++p) {
        const int32_t q = t_.solo[p] >= 0 ? ws_.total[t_.solo[p]] : 0;
        quota_[p] = q;
        load += q;
      }
      ws_.load[r] = load;
      top = cost(r) > top ? cost(r) : top;
    });
    level_ = smallest_peak(
        copies + pour,
        [&](auto&& f) {
          for (int r = 0; r < R; ++r) f(r);
        },
        R);
    top = team_.max(top);
    bound_ = top > level_ ? top : level_;
    return PlanStatus::ok;
  }

  // The smallest peak at which `size` ranks, listed by each(f), can carry `copies` copies between them.
  template <class Each>
  ISOLOAD_HD int64_t smallest_peak(int64_t copies, Each&& each, int size) const {
    if (!in_.ticks) return (copies + size - 1) / size;
    int64_t low = 0, high = copies << 20;  // one rank alone could carry everything
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      int64_t room = 0;
      each([&](int r) { room += middle / in_.ticks[r]; });
      if (room >= copies)
        high = middle;
      else
        low = middle + 1;
    }
    return low;
  }

  // Not inlined, like finish(): three starts inside solve() make the augmenting loop there a tenth slower.
  ISOLOAD_HD ISOLOAD_COLD void start() {
    Start<Team> start{team_, t_, ws_.total, in_.ticks, ws_.load, quota_};
    switch (in_.objective) {
      case Objective::spread:
        return start.spread();
      case Objective::local:
        return start.local(in_.loads, in_.R, in_.E, in_.per_node);
      case Objective::packed:
        return start.packed(ws_.copies, ws_.falling);
    }
  }

  // f(e) of every replicated expert, class by class: meanwhile an expert's ranks are its own.
  template <class F>
  ISOLOAD_HD void class_by_class(F&& f) {
    for (int k = 0; k < t_.num_classes(); ++k) {
      const int first = t_.classes[k];
      team_.for_each(t_.classes[k + 1] - first, [&](int i) { f(expert(first + i)); });
      team_.sync();
    }
  }

  ISOLOAD_HD void sweep() {
    class_by_class([&](int e) { balance(t_, e, ws_.total[e], in_.ticks, ws_.load, quota_); });
  }

  // Few active replicas are the aim of packed only.
  ISOLOAD_HD ISOLOAD_COLD void finish() {
    if (in_.objective == Objective::packed)
      class_by_class([&](int e) { close_replicas(t_, e, ws_.cap, ws_.load, quota_); });
  }

  ISOLOAD_HD void list_ranks() {
    team_.for_each(t_.num_split(), [&](int i) {
      const int e = expert(i);
      RankSet<W> holders, givers;
      for (int j = t_.offsets[e]; j < t_.offsets[e + 1]; ++j) {
        holders.insert(t_.ranks[j]);
        givers.insert_if(quota_[t_.slots[j]] > 0, t_.ranks[j]);
      }
      ws_.holders[i] = holders;
      ws_.givers[i] = givers;
    });
    team_.sync();
  }

  // Sets the target: what each rank may carry, who carries more, who less.
  ISOLOAD_HD void aim(int64_t target) {
    over_ = under_ = RankSet<W>();
    team_.for_each(in_.R, [&](int r) {
      const int64_t room = in_.ticks ? target / in_.ticks[r] : target;
      ws_.cap[r] = static_cast<int32_t>(room < INT32_MAX ? room : INT32_MAX);
      over_.insert_if(ws_.load[r] > ws_.cap[r], r);
      under_.insert_if(ws_.load[r] < ws_.cap[r], r);
    });
    over_ = unite(team_, over_);
    under_ = unite(team_, under_);
  }

  // Breadth first, backwards: level 0 has room, level k can hand copies to level k-1. Returns the level that
  // holds an overloaded rank, or -1.
  ISOLOAD_HD int find_levels() {
    RankSet<W> seen = under_, frontier = under_;
    for (int depth = 0;;) {
      if (team_.rank() == 0) ws_.levels[depth] = frontier;
      if (frontier.meets(over_)) return team_.sync(), depth;
      RankSet<W> next;
      team_.for_each(t_.num_split(),
                     [&](int i) { next.unite_if(ws_.holders[i].meets(frontier), ws_.givers[i]); });
      next = unite(team_, next).subtract(seen);
      if (next.empty()) return -1;
      seen |= next;
      frontier = next;
      ++depth;
    }
  }

  // Everything reachable from the overloaded ranks: its load cannot leave, so its mean is a bound. Never all
  // ranks: the target is at least level_, at which all ranks together have room for everything, `pour`
  // included. So `pour` need not be counted here: a smaller set can leave it to the others.
  ISOLOAD_HD int64_t certify() {
    RankSet<W> closed = over_;
    for (RankSet<W> before; !(before == closed);) {
      before = closed;
      RankSet<W> next;
      team_.for_each(t_.num_split(),
                     [&](int i) { next.unite_if(ws_.givers[i].meets(closed), ws_.holders[i]); });
      closed |= unite(team_, next);
    }
    int64_t copies = 0;
    int size = 0;
    closed.for_each([&](int r) { copies += ws_.load[r], ++size; });
    return smallest_peak(copies, [&](auto&& f) { closed.for_each(f); }, size);
  }

  // One path from the lowest overloaded rank of the last level down to level 0, the widest hop each time.
  ISOLOAD_HD void augment(int depth) {
    const int source = ws_.levels[depth].lowest_in(over_);
    int u = source;
    int32_t width = ws_.load[u] - ws_.cap[u];
    for (int k = depth; k > 0; --k) {
      const RankSet<W> below = ws_.levels[k - 1];
      int64_t best = -1;  // the most copies, then the lowest index in order
      team_.for_each(in_.S, [&](int s) {
        const int p = u * in_.S + s, i = t_.split[p];
        if (i < 0 || quota_[p] == 0 || !ws_.holders[i].meets(below)) return;
        const int64_t key = int64_t(quota_[p]) << 32 | uint32_t(INT32_MAX - i);
        best = key > best ? key : best;
      });
      best = team_.max(best);
      const int i = INT32_MAX - static_cast<int>(best & 0xffffffff);
      const int32_t quota = static_cast<int32_t>(best >> 32);
      width = quota < width ? quota : width;
      const int j = pick_replica(expert(i), below, k == 1);
      if (team_.rank() == 0) {
        ws_.from[k - 1] = slot_on(expert(i), u);
        ws_.to[k - 1] = t_.slots[j];
      }
      u = t_.ranks[j];
    }
    const int32_t room = ws_.cap[u] - ws_.load[u];
    width = room < width ? room : width;
    team_.sync();  // all lanes have read the loads that lane 0 changes now
    if (team_.rank() == 0) {
      for (int k = 0; k < depth; ++k) move(ws_.from[k], ws_.to[k], width);
      ws_.load[source] -= width;
      ws_.load[u] += width;
    }
    team_.sync();
    if (ws_.load[source] <= ws_.cap[source]) over_.erase(source);
    if (ws_.load[u] >= ws_.cap[u]) under_.erase(u);
  }

  // e's replica in `level`: the lowest, or where paths end the one with most room (ties to the lowest).
  ISOLOAD_HD int pick_replica(int e, const RankSet<W>& level, bool last_hop) const {
    int best = -1;
    for (int j = t_.offsets[e]; j < t_.offsets[e + 1]; ++j) {
      if (!level.contains(t_.ranks[j])) continue;
      if (best < 0 || (last_hop && room(t_.ranks[j]) > room(t_.ranks[best]))) best = j;
    }
    return best;
  }
  ISOLOAD_HD int32_t room(int r) const { return ws_.cap[r] - ws_.load[r]; }

  ISOLOAD_HD int slot_on(int e, int rank) const {
    int j = t_.offsets[e];
    while (t_.ranks[j] != rank) ++j;
    return t_.slots[j];
  }

  ISOLOAD_HD void move(int from, int to, int32_t copies) {
    quota_[from] -= copies;
    quota_[to] += copies;
    RankSet<W>& givers = ws_.givers[t_.split[from]];
    if (quota_[from] == 0) givers.erase(from / in_.S);
    givers.insert(to / in_.S);
  }

  Team& team_;
  const ExactProblem& in_;
  const ReplicaTables t_;
  const ExactWorkspace<W> ws_;
  int32_t* const quota_;
  int64_t bound_ = 0, level_ = 0;  // level_: the least peak if every copy could be anywhere
  RankSet<W> over_, under_;
};

struct ExactPlanner {  // see planner.h
  using Problem = ExactProblem;
  using Result = ExactResult;
  static constexpr bool kSets = true;

  ISOLOAD_HD static void select(Problem& in, Result& out, int64_t b) {
    const int64_t E = in.E, R = in.R, P = R * in.S;
    in.tables = in.tables.layer(b, E, P);
    in.loads += b * in.num_sources * E;
    if (in.fixed) in.fixed += b * R;
    if (in.pour) in.pour += b;
    out = {out.quota + b * P, out.peak + b, out.bound + b, out.telemetry + b * 4};
  }
  template <int W>
  ISOLOAD_HD static int64_t bytes(const Problem& in) {
    return ExactWorkspace<W>::bytes(in.R, in.E);
  }
  template <int W, class Team>
  ISOLOAD_HD static int solve(Team& team, const Problem& in, void* memory, const Result& out) {
    ExactSolver<W, Team> solver(team, in, ExactWorkspace<W>::at(memory, in.R, in.E), out.quota);
    const PlanStatus status = solver.solve(out);
    return status == PlanStatus::ok ? kPlanned : static_cast<int>(status);
  }
  template <class Team>
  ISOLOAD_HD static void refuse(Team& team, const Problem& in, const Result& out) {
    team.for_each(in.R * in.S, [&](int p) { out.quota[p] = 0; });
    team.for_each(4, [&](int i) { out.telemetry[i] = 0; });
    if (team.rank() == 0) *out.peak = *out.bound = -1;
  }
};

}  // namespace isoload
