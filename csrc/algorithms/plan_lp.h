// plan_lp: the real-valued split with the least largest rank cost, by an interior point method.
//
//   minimise M   subject to   sum of an expert's parts x = its load               (price w)
//                             rank's burden + its parts + slack s = speed * M     (price y)
//                             x >= 0, s >= 0
// At the optimum speed'y = 1, y >= 0, reduced costs z = y - w >= 0 and x z = s y = 0. The method walks there
// along x z = s y = mu, mu falling: Mehrotra's predictor and corrector. It starts strictly feasible and
// almost centred, so no big-M is needed. Newton's equations are a resistor network between ranks and experts
// with conductances x / z (network.h), which makes the method small, and accurate in float32. Any y >= 0
// proves a bound on M, so dual is true whatever the iterations did.
//
// The same bits on every rank, team and device: sums have a fixed order, nothing is contracted.
#pragma once

#include <cstdint>

#include "algorithms/mesh.h"
#include "algorithms/mesh_columns.h"
#include "algorithms/network.h"
#include "algorithms/ordered_sum.h"
#include "algorithms/plan_lp_parts.h"
#include "host_device.h"
#include "planner.h"

namespace isoload {

template <class Real, class Team, class Mesh>
class LpSolver {
 public:
  ISOLOAD_HD LpSolver(Team& team, const LpProblem<Real>& problem, const LpWorkspace<Real>& workspace)
      : team_(team), in_(problem), ws_(workspace), sum_(team, workspace.columns) {}

  // False if the problem cannot be solved, see LpParts::list.
  ISOLOAD_HD bool solve(const LpResult<Real>& out) {
    LpParts<Real, Team> parts(team_, in_, ws_, out.split);
    if (!parts.list()) return false;
    ranks_ = parts.ranks();
    experts_ = parts.experts();
    num_edges_ = parts.num_edges();
    dual_ = parts.heaviest_burden();
    Net network(team_, sum_, ranks_, experts_, ws_.network);
    int32_t iterations = 0;
    LpStatus status = LpStatus::open;
    ISOLOAD_ROLLED
    for (bool again = true; again;) {  // a second time after a breakdown, for the split of the start
      again = status != LpStatus::broke_down;
      spread();
      status = approach(network, again, iterations);
      again = again && status == LpStatus::broke_down;
    }
    team_.for_each(num_parts(), [&](int i) {
      const int k = ranks_.size + i;
      out.split[ws_.edge_slot[k]] = copies(k);
    });
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
  using Net = Network<Real, Team, Mesh>;
  static constexpr Real kRoom = Real(1.1);     // M at the start, in largest costs
  static constexpr Real kReach = Real(0.999);  // how much of the way to a zero a step goes
  static constexpr Real kCentre = Real(0.2);   // the gap aimed at last, in tolerances

  // From the start towards the optimum; after a breakdown (not `sound`) only the start is measured.
  ISOLOAD_HD LpStatus approach(Net& network, bool sound, int32_t& iterations) {
    ISOLOAD_ROLLED
    for (bool priced = false;; priced = true) {
      const LpStatus status = residuals(priced);
      if (!sound) return LpStatus::broke_down;
      if (status != LpStatus::open || (priced && iterations == in_.iterations)) return status;
      if (priced)
        step(network), ++iterations;
      else
        centre();
    }
  }

  // The even split, or in proportion to speeds.
  ISOLOAD_HD void spread() {
    team_.for_each(experts_.size, [&](int e) {
      const Real speed = experts_.total(e, Real(0), [&](int k) { return ws_.speed[ws_.edge_rank[k]]; });
      ISOLOAD_ROLLED
      for (int k = experts_.first[e]; k < experts_.first[e + 1]; ++k) {
        ws_.x[k] = ws_.load[e] * (ws_.speed[ws_.edge_rank[k]] / speed);
      }
    });
  }

  // M and s away from 0; prices y ~ 1 / s, so that s y = mu; the largest w that leaves all x z >= mu.
  ISOLOAD_HD void centre() {
    M_ = kRoom * primal_;
    team_.for_each(ranks_.size, [&](int r) { ws_.x[r] = ws_.speed[r] * (M_ - ws_.cost[r]); });
    const Real mu = 1 / sum_(ranks_.size, [&](int r) { return ws_.speed[r] / ws_.x[r]; });
    team_.for_each(ranks_.size, [&](int r) {
      ws_.z[r] = mu / ws_.x[r];
      ws_.product[r] = ws_.x[r] * ws_.z[r];
    });
    team_.sync();
    team_.for_each(experts_.size, [&](int e) {
      const Real price =
          experts_.template least<Real>(e, [&](int k) { return ws_.z[ws_.edge_rank[k]] - mu / ws_.x[k]; });
      ISOLOAD_ROLLED
      for (int k = experts_.first[e]; k < experts_.first[e + 1]; ++k) {
        ws_.z[k] = ws_.z[ws_.edge_rank[k]] - price;
        ws_.product[ws_.edge_place[k]] = ws_.x[k] * ws_.z[k];
      }
    });
  }

  // The largest cost; where there are prices, what the equations lack, mu, and the certificate.
  ISOLOAD_HD LpStatus residuals(bool priced) {
    team_.sync();
    for_nodes(
        [&](int e) {
          const Real sum = experts_.total(e, Real(0), [&](int k) { return ws_.x[k]; });
          ws_.scale[e] = ws_.load[e] / sum;
          if (!priced) return;
          ws_.expert_excess[e] = ws_.load[e] - sum;
          const Real price = experts_.template least<Real>(e, [&](int k) { return ws_.z[ws_.edge_rank[k]]; });
          ws_.value[e] = ws_.load[e] * price;
        },
        [&](int r) {
          if (!priced) return;
          const Real carried = ranks_.total(r, ws_.burden[r], [&](int k) { return ws_.x[k]; });
          ws_.rank_excess[r] = ws_.speed[r] * M_ - carried - ws_.x[r];
        });
    team_.sync();
    if (priced)
      sum_.start(Terms{num_parts(), [&](int i) { return ws_.product[ranks_.size + i]; }},
                 Terms{ranks_.size, [&](int r) { return ws_.product[r]; }},
                 Terms{ranks_.size, [&](int r) { return ws_.speed[r] * ws_.z[r]; }},
                 Terms{ranks_.size, [&](int r) { return ws_.burden[r] * ws_.z[r]; }},
                 Terms{experts_.size, [&](int e) { return ws_.value[e]; }});
    primal_ = largest(team_, largest_cost(5 * sum_.kColumns));  // its barrier is that of the sums, too
    if (priced) {
      const Real prices = sum_.take(2);
      Real products = 0, value = 0;
      ISOLOAD_ROLLED
      for (int i = 0; i < 2; ++i) products += sum_.take(i), value += sum_.take(3 + i);
      mu_ = products / Real(num_edges_);
      price_excess_ = 1 - prices;
      const Real bound = value / prices;
      if (!finite(bound) || !finite(mu_)) return LpStatus::broke_down;
      dual_ = bound > dual_ ? bound : dual_;
    }
    if (!finite(primal_)) return LpStatus::broke_down;
    return primal_ - dual_ <= in_.tolerance * primal_ ? LpStatus::converged : LpStatus::open;
  }

  // Of this lane's ranks, with every expert's parts scaled to its load. Lanes before `busy` have other work.
  ISOLOAD_HD Real largest_cost(int busy) {
    Real top = 0;
    for_each_behind(busy, ranks_.size, [&](int r) {
      ws_.cost[r] = ranks_.total(r, ws_.burden[r], [&](int k) { return copies(k); }) / ws_.speed[r];
      top = ws_.cost[r] <= top ? top : ws_.cost[r];  // keeps NaN
    });
    return top;
  }

  // Newton's step, in three rounds. First to x z = s y = 0: it is not taken, but shows how far mu can fall,
  // and what it leaves out. Then to the target. Then against rounding: parts with large conductances leave a
  // residual behind.
  ISOLOAD_HD void step(Net& network) {
    constexpr int kRounds = 3;
    team_.for_each(num_edges_, [&](int k) {
      ws_.conductance[k] = ws_.x[k] / ws_.z[k];
      ws_.dx[k] = 0 - ws_.x[k];
      ws_.dz[k] = 0;
    });
    dM_ = 0;
    const Flow<Real> flows[kFlows] = {{ws_.rank_u, ws_.expert_u}, {ws_.rank_g, ws_.expert_g}};
    ISOLOAD_ROLLED
    for (int round = 0; round < kRounds; ++round) {
      team_.sync();
      lack(round == 0);
      if (round == 0)
        network.factor(ws_.conductance, ws_.conductance, ws_.expert_ground);
      else
        team_.sync();
      network.solve(flows, round == 0 ? 2 : 1);
      const bool last_of_step = round != 1, only_see = round == 0;
      Real x = 0, z = 0;  // the steepest ways to a first zero, of this lane's edges; then how far to go
      follow(round == 0, last_of_step, x, z);
      if (!last_of_step) continue;
      ISOLOAD_ROLLED
      for (int i = 0; i < 2; ++i) {  // of z, then of x
        const Real length = reach(largest(team_, z), only_see ? Real(1) : kReach);
        z = x;
        x = length;
      }
      advance(x, z, only_see);
      if (only_see) aim();
    }
  }

  // What ranks and experts lack once the step is taken; `first`: and the currents that g is the response to.
  ISOLOAD_HD void lack(bool first) {
    auto change = [&](int k) { return ws_.dx[k]; };
    for_nodes(
        [&](int e) {
          ws_.expert_u[e] = ws_.expert_excess[e] - experts_.total(e, Real(0), change);
          if (first) ws_.expert_g[e] = 0;
        },
        [&](int r) {
          ws_.rank_u[r] = ranks_.total(r, ws_.dx[r], change) - ws_.rank_excess[r] - ws_.speed[r] * dM_;
          if (first) ws_.rank_g[r] = ws_.speed[r];
        });
  }

  // Changes prices and M by what ranks, experts and speed'y = 1 still lack; x z and s y stay on target. g:
  // the response of prices to a rise of M, of which `first` finds the pull. `look`: for the steepest way to a
  // zero.
  ISOLOAD_HD void follow(bool first, bool look, Real& steepest_x, Real& steepest_z) {
    sum_.start(Terms{ranks_.size, [&](int r) { return ws_.speed[r] * (ws_.rank_u[r] + ws_.dz[r]); }},
               Terms{ranks_.size, [&](int r) { return ws_.speed[r] * ws_.rank_g[r]; }});
    team_.sync();
    Real prices = 0;
    ISOLOAD_ROLLED
    for (int i = first ? 1 : 0; i >= 0; --i) {
      prices = sum_.take(i);
      if (i == 1) pull_ = prices;
    }
    const Real rise = (prices - price_excess_) / pull_;
    auto steeper = [](Real steepest, Real value, Real change) {
      const Real slope = -change / value;
      return slope > steepest ? slope : steepest;
    };
    team_.for_each(num_edges_, [&](int k) {
      const int r = ws_.edge_rank[k], e = ws_.edge_expert[k];
      const Real change = (ws_.rank_u[r] - ws_.expert_u[e]) - rise * (ws_.rank_g[r] - ws_.expert_g[e]);
      const Real dz = ws_.dz[k] + change, dx = ws_.dx[k] - ws_.conductance[k] * change;
      if (look) {
        steepest_x = steeper(steepest_x, ws_.x[k], dx);
        steepest_z = steeper(steepest_z, ws_.z[k], dz);
      }
      ws_.dz[k] = dz;
      ws_.dx[k] = dx;
    });
    dM_ += rise;
  }

  // Goes along the step: only to see the products there, or almost up to the first zero. z follows its step:
  // recomputed as y - w it would lose what x / z then magnifies.
  ISOLOAD_HD void advance(Real a, Real b, bool only_see) {
    team_.for_each(num_edges_, [&](int k) {
      const Real x = ws_.x[k] + a * ws_.dx[k], z = ws_.z[k] + b * ws_.dz[k];
      ws_.product[ws_.edge_place[k]] = x * z;
      if (only_see) return;
      ws_.x[k] = x;
      ws_.z[k] = z;
    });
    if (!only_see) M_ += a * dM_;
  }

  // The step to x z = s y = target with prices held; the target: how far mu can fall. follow() pulls it back
  // to the other equations.
  ISOLOAD_HD void aim() {
    team_.sync();
    sum_.start(Terms{num_parts(), [&](int i) { return ws_.product[ranks_.size + i]; }},
               Terms{ranks_.size, [&](int r) { return ws_.product[r]; }});
    team_.sync();
    Real products = 0;
    ISOLOAD_ROLLED
    for (int i = 0; i < 2; ++i) products += sum_.take(i);
    const Real ratio = products / Real(num_edges_) / mu_;
    const Real last = kCentre * in_.tolerance * primal_ / Real(num_edges_);
    Real target = ratio * ratio * ratio * mu_;
    target = target > last ? target : last;
    team_.for_each(num_edges_, [&](int k) {
      ws_.dx[k] = (target - ws_.dx[k] * ws_.dz[k]) / ws_.z[k] - ws_.x[k];
      ws_.dz[k] = 0;
    });
    dM_ = 0;
  }

  // The step length, at most 1, that goes `share` of the way to the first zero.
  ISOLOAD_HD static Real reach(Real steepest, Real share) {
    const Real length = share / steepest;
    return length < 1 ? length : 1;
  }

  ISOLOAD_HD int num_parts() const { return num_edges_ - ranks_.size; }
  ISOLOAD_HD Real copies(int k) const { return ws_.x[k] * ws_.scale[ws_.edge_expert[k]]; }
  ISOLOAD_HD static bool finite(Real value) { return value - value == 0; }

  // for_each by lanes that do not take the first `busy` turns; warps of their own.
  template <class F>
  ISOLOAD_HD void for_each_behind(int busy, int n, F&& f) {
    const int first = team_.size() == 1 ? 0 : (busy + 31) / 32 * 32;
    team_.for_each(first + n, [&](int i) {
      if (i >= first) f(i - first);
    });
  }

  template <class F, class G>
  ISOLOAD_HD void for_nodes(F&& of_expert, G&& of_rank) {
    team_.for_each(experts_.size, of_expert);
    for_each_behind(experts_.size, ranks_.size, of_rank);
  }

  Team& team_;
  const LpProblem<Real>& in_;
  const LpWorkspace<Real>& ws_;
  OrderedSum<Real, Team> sum_;
  NetworkSide ranks_{}, experts_{};
  int num_edges_ = 0;
  Real M_ = 0, dM_ = 0, mu_ = 0, primal_ = 0, dual_ = 0;
  Real price_excess_ = 0, pull_ = 0;  // 1 - speed'y; speed'g
};

// kMostRanks: where none has more, the mesh is one of columns, else 0.
template <class Real, int kMostRanks = 0>
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
    using Mesh = typename MeshOf<Real, Team, kMostRanks>::type;
    return LpSolver<Real, Team, Mesh>(team, in, workspace).solve(out) ? kPlanned : 0;
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
