// plan_lp: the real-valued split with the least largest rank load, by an interior point method.
//
//   minimise M   subject to   sum of an expert's parts x = its load             (price w)
//                             rank's burden + its parts + slack s = M           (price y)
//                             x >= 0, s >= 0
// At the optimum 1'y = 1, y >= 0, reduced costs z = y - w >= 0 and x z = s y = 0. The method follows the path
// x z = s y = mu while mu falls: Mehrotra's predictor and corrector. It starts strictly feasible and almost
// centred, so no big M is needed. Newton's equations reduce to normal equations with one unknown per rank, or
// per expert where there are fewer (cholesky.h). Any y >= 0 proves a bound on M, so dual is a bound whatever
// the iterations did.
//
// The bits are the same on every rank, team and device: sums have a fixed order, nothing is contracted.
#pragma once

#include <cstdint>

#include "algorithms/cholesky.h"
#include "algorithms/plan_lp_parts.h"
#include "host_device.h"
#include "planner.h"

namespace isoload {

template <class Real, class Team>
class LpSolver {
 public:
  ISOLOAD_HD LpSolver(Team& team, const LpProblem<Real>& problem, const LpWorkspace<Real>& workspace)
      : team_(team), in_(problem), ws_(workspace), sums_(team, workspace.sums) {}

  // False if the problem cannot be solved, see LpParts::list.
  ISOLOAD_HD bool solve(const LpResult<Real>& out) {
    LpParts<Real, Team> parts(team_, in_, ws_, out.split);
    if (!parts.list()) return false;
    ranks_ = parts.ranks();
    experts_ = parts.experts();
    num_edges_ = parts.num_edges();
    dual_ = parts.heaviest_burden();
    Cholesky<Real, Team> equations(team_, ranks_, experts_, ws_.cholesky);
    int iterations = 0;
    LpStatus status = LpStatus::open;
    ISOLOAD_ROLLED
    for (bool again = true; again;) {  // a second time after a breakdown, for the split of the start
      again = status != LpStatus::broke_down;
      spread();
      status = approach(equations, again, iterations);
      again = again && status == LpStatus::broke_down;
    }
    parts.for_parts([&](int p, int k) { out.split[p] = copies(k); });
    if (team_.rank() == 0) {
      *out.primal = primal_;
      *out.dual = dual_;
      *out.iterations = iterations;
      *out.status = static_cast<int32_t>(status);
    }
    team_.sync();
    return true;
  }

 private:
  static constexpr Real kRoom = Real(1.1);     // M at the start, in largest loads
  static constexpr Real kReach = Real(0.999);  // how much of the way to a zero a step goes
  static constexpr Real kCentre = Real(0.2);   // the gap aimed at last, in tolerances

  // From the start towards the optimum; after a breakdown (not `sound`) only the start is measured.
  ISOLOAD_HD LpStatus approach(Cholesky<Real, Team>& equations, bool sound, int& iterations) {
    ISOLOAD_ROLLED
    for (bool priced = false;; priced = true) {
      const LpStatus status = residuals(priced);
      if (!sound) return LpStatus::broke_down;
      if (status != LpStatus::open || (priced && iterations == in_.iterations)) return status;
      if (priced)
        step(equations), ++iterations;
      else
        centre();
    }
  }

  // The even split.
  ISOLOAD_HD void spread() {
    team_.for_each(experts_.size, [&](int e) {
      const Real part = ws_.load[e] / Real(experts_.end[e] - experts_.first[e]);
      for_edges(experts_, e, [&](int k) { ws_.x[k] = part; });
    });
  }

  // M and s away from 0; prices y ~ 1 / s, so that s y = mu; the largest w that leaves all x z >= mu.
  ISOLOAD_HD void centre() {
    M_ = kRoom * primal_;
    sums_.start();
    sums_.add(0, in_.R, [&](int r) { return 1 / (M_ - ws_.cost[r]); });
    team_.sync();
    const Real mu = 1 / sums_.take(0);
    team_.for_each(in_.R, [&](int r) {
      ws_.x[r] = M_ - ws_.cost[r];
      ws_.z[r] = mu / ws_.x[r];
    });
    team_.sync();
    team_.for_each(experts_.size, [&](int e) {
      const Real price = least(e, [&](int k) { return ws_.z[ws_.edge_rank[k]] - mu / ws_.x[k]; });
      for_edges(experts_, e, [&](int k) { ws_.z[k] = ws_.z[ws_.edge_rank[k]] - price; });
    });
  }

  // The largest load; where there are prices, what the equations lack, mu, and the certificate.
  ISOLOAD_HD LpStatus residuals(bool priced) {
    team_.sync();
    for_nodes(
        [&](int e) {
          const Real sum = experts_.total(e, Real(0), [&](int k) { return ws_.x[k]; });
          ws_.scale[e] = ws_.load[e] / sum;
          if (!priced) return;
          ws_.expert_excess[e] = ws_.load[e] - sum;
          ws_.value[e] = ws_.load[e] * least(e, [&](int k) { return ws_.z[ws_.edge_rank[k]]; });
        },
        [&](int r) {
          if (!priced) return;
          const Real taken = ranks_.total(r, ws_.burden[r], [&](int k) { return ws_.x[k]; });
          ws_.rank_excess[r] = M_ - taken - ws_.x[r];
          ws_.product[r] = ranks_.total(r, ws_.x[r] * ws_.z[r], [&](int k) { return ws_.x[k] * ws_.z[k]; });
        });
    team_.sync();
    if (priced) {
      sums_.start();
      sums_.add(0, in_.R, [&](int r) { return ws_.product[r]; });
      sums_.add(1, in_.R, [&](int r) { return ws_.z[r]; });
      sums_.add(2, in_.R, [&](int r) { return ws_.burden[r] * ws_.z[r]; });
      sums_.add(3, experts_.size, [&](int e) { return ws_.value[e]; });
    }
    Real top = 0;
    team_.for_each(in_.R, [&](int r) {
      ws_.cost[r] = ranks_.total(r, ws_.burden[r], [&](int k) { return copies(k); });
      top = ws_.cost[r] <= top ? top : ws_.cost[r];  // keeps NaN
    });
    primal_ = largest(team_, top);  // its barrier is that of the sums, too
    if (priced) {
      const Real prices = sums_.take(1), bound = (sums_.take(2) + sums_.take(3)) / prices;
      mu_ = sums_.take(0) / Real(num_edges_);
      price_excess_ = 1 - prices;
      if (!finite(bound) || !finite(mu_)) return LpStatus::broke_down;
      dual_ = bound > dual_ ? bound : dual_;
    }
    if (!finite(primal_)) return LpStatus::broke_down;
    return primal_ - dual_ <= in_.tolerance * primal_ ? LpStatus::converged : LpStatus::open;
  }

  // Newton's step, in three rounds. First to x z = s y = 0: it is not taken, but shows how far mu can fall,
  // and what it leaves out. Then to the target. Then one refinement against rounding: parts with large
  // weights leave a residual behind.
  ISOLOAD_HD void step(Cholesky<Real, Team>& equations) {
    constexpr int kRounds = 3;
    team_.for_each(num_edges_, [&](int k) {
      ws_.weight[k] = ws_.x[k] / ws_.z[k];
      ws_.dx[k] = 0 - ws_.x[k];
      ws_.dz[k] = 0;
    });
    dM_ = 0;
    team_.sync();
    equations.factor(ws_.weight);
    ISOLOAD_ROLLED
    for (int round = 0; round < kRounds; ++round) {
      const bool first = round == 0;
      lack(first);
      team_.sync();
      equations.solve(ws_.rank_step, ws_.expert_step, first ? 2 : 1);
      Real x = 0, z = 0;  // the steepest ways to a first zero, of this lane's edges; then how far to go
      follow(first, round != 1, x, z);
      if (round == 1) {
        team_.sync();
        continue;
      }
      const Real share = first ? Real(1) : kReach;
      x = reach(largest(team_, x), share);
      z = reach(largest(team_, z), share);
      first ? aim(x, z) : advance(x, z);
    }
  }

  // What ranks and experts lack once the step is taken; `first`: also the right-hand side of M.
  ISOLOAD_HD void lack(bool first) {
    auto change = [&](int k) { return ws_.dx[k]; };
    for_nodes(
        [&](int e) {
          ws_.expert_step[e] = ws_.expert_excess[e] - experts_.total(e, Real(0), change);
          if (first) ws_.expert_step[experts_.size + e] = 0;
        },
        [&](int r) {
          ws_.rank_step[r] = ranks_.total(r, ws_.dx[r], change) - ws_.rank_excess[r] - dM_;
          if (first) ws_.rank_step[in_.R + r] = 1;
        });
  }

  // Changes prices and M by what ranks, experts and 1'y = 1 still lack; x z and s y stay on target. The
  // second flow is the response of prices to a rise of M, of which `first` adds up the pull. `look`: for the
  // steepest way to a zero.
  ISOLOAD_HD void follow(bool first, bool look, Real& steepest_x, Real& steepest_z) {
    const Real *rank = ws_.rank_step, *expert = ws_.expert_step;
    const int R = in_.R, E = experts_.size;
    sums_.start();
    sums_.add(0, R, [&](int r) { return rank[r] + ws_.dz[r]; });
    if (first) sums_.add(1, R, [&](int r) { return rank[R + r]; });
    team_.sync();
    if (first) pull_ = sums_.take(1);
    const Real rise = (sums_.take(0) - price_excess_) / pull_;
    team_.for_each(num_edges_, [&](int k) {
      const int r = ws_.edge_rank[k], e = k < R ? 0 : ws_.edge_expert[k];
      const Real change =
          k < R ? rank[r] - rise * rank[R + r] : (rank[r] - expert[e]) - rise * (rank[R + r] - expert[E + e]);
      const Real dz = ws_.dz[k] + change, dx = ws_.dx[k] - ws_.weight[k] * change;
      if (look) {
        steepest_x = steeper(steepest_x, ws_.x[k], dx);
        steepest_z = steeper(steepest_z, ws_.z[k], dz);
      }
      ws_.dz[k] = dz;
      ws_.dx[k] = dx;
    });
    dM_ += rise;
  }

  // The step to x z = s y = target with prices unchanged. The target: how far mu falls by a step of lengths
  // a and b. follow() pulls it back to the other equations.
  ISOLOAD_HD void aim(Real a, Real b) {
    auto product = [&](int k) { return (ws_.x[k] + a * ws_.dx[k]) * (ws_.z[k] + b * ws_.dz[k]); };
    team_.for_each(in_.R, [&](int r) { ws_.product[r] = ranks_.total(r, product(r), product); });
    team_.sync();
    sums_.start();
    sums_.add(0, in_.R, [&](int r) { return ws_.product[r]; });
    team_.sync();
    const Real ratio = sums_.take(0) / Real(num_edges_) / mu_;
    const Real last = kCentre * in_.tolerance * primal_ / Real(num_edges_);
    Real target = ratio * ratio * ratio * mu_;
    target = target > last ? target : last;
    team_.for_each(num_edges_, [&](int k) {
      ws_.dx[k] = (target - ws_.dx[k] * ws_.dz[k]) / ws_.z[k] - ws_.x[k];
      ws_.dz[k] = 0;
    });
    dM_ = 0;
    team_.sync();
  }

  // Takes the step. z follows its own step: recomputed as y - w it would lose what x / z then magnifies.
  ISOLOAD_HD void advance(Real a, Real b) {
    team_.for_each(num_edges_, [&](int k) {
      ws_.x[k] += a * ws_.dx[k];
      ws_.z[k] += b * ws_.dz[k];
    });
    M_ += a * dM_;
  }

  ISOLOAD_HD static Real steeper(Real steepest, Real value, Real change) {
    const Real slope = -change / value;
    return slope > steepest ? slope : steepest;
  }

  // The step length, at most 1, that goes `share` of the way to the first zero.
  ISOLOAD_HD static Real reach(Real steepest, Real share) {
    const Real length = share / steepest;
    return length < 1 ? length : 1;
  }

  ISOLOAD_HD Real copies(int k) const { return ws_.x[k] * ws_.scale[ws_.edge_expert[k]]; }
  ISOLOAD_HD static bool finite(Real value) { return value - value == 0; }

  template <class F>
  ISOLOAD_HD void for_edges(const Side& side, int i, F&& f) const {
    ISOLOAD_ROLLED
    for (int j = side.first[i]; j < side.end[i]; ++j) f(side.edge(j));
  }

  // The least term(k) of an expert's parts.
  template <class F>
  ISOLOAD_HD Real least(int e, F&& term) const {
    Real least = term(experts_.edge(experts_.first[e]));
    ISOLOAD_ROLLED
    for (int j = experts_.first[e] + 1; j < experts_.end[e]; ++j) {
      const Real value = term(experts_.edge(j));
      least = value < least ? value : least;
    }
    return least;
  }

  // of_expert(e) and of_rank(r) of all, at once where there are lanes for both.
  template <class F, class G>
  ISOLOAD_HD void for_nodes(F&& of_expert, G&& of_rank) {
    const int first = team_.size() == 1 ? 0 : (experts_.size + 31) / 32 * 32;  // whole warps
    team_.for_each(experts_.size, of_expert);
    team_.for_each(first + in_.R, [&](int i) {
      if (i >= first) of_rank(i - first);
    });
  }

  Team& team_;
  const LpProblem<Real>& in_;
  const LpWorkspace<Real>& ws_;
  Sums<Real, Team> sums_;
  Side ranks_{}, experts_{};
  int num_edges_ = 0;
  Real M_ = 0, dM_ = 0, mu_ = 0, primal_ = 0, dual_ = 0;
  Real price_excess_ = 0, pull_ = 0;  // 1 - 1'y; sum of the prices' response to M
};

template <class Real>
struct LpPlanner : PlannerOf<LpProblem<Real>, LpResult<Real>> {  // see planner.h
  using Problem = LpProblem<Real>;
  using Result = LpResult<Real>;

  ISOLOAD_HD static void select(Problem& in, Result& out, int64_t b) {
    const int64_t P = int64_t(in.R) * in.S;
    in.SplitProblem::select(b);
    if (in.base) in.base += b * in.R;
    out = {out.split + b * P, out.primal + b, out.dual + b, out.iterations + b, out.status + b};
  }
  template <int W>
  ISOLOAD_HD static int64_t bytes(const Problem& in) {
    return LpWorkspace<Real>::size(in.R, in.E, int64_t(in.R) * in.S);
  }
  template <int W, class Team>
  ISOLOAD_HD static int solve(Team& team, const Problem& in, void* memory, const Result& out) {
    const LpWorkspace<Real> workspace(memory, in.R, in.E, int64_t(in.R) * in.S);
    return LpSolver<Real, Team>(team, in, workspace).solve(out) ? kPlanned : 0;
  }
  template <class Team>
  ISOLOAD_HD static void refuse(Team& team, const Problem& in, const Result& out) {
    team.for_each(in.R * in.S, [&](int p) { out.split[p] = 0; });
    if (team.rank() > 0) return;
    *out.primal = *out.dual = -1;
    *out.iterations = 0;
    *out.status = static_cast<int32_t>(LpStatus::broke_down);
  }
};

}  // namespace isoload
