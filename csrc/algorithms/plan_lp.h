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
#include <cstring>
#include <type_traits>

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
    num_parts_ = parts.size();
    Net network(team_, sum_, ranks_, experts_, ws_.network);
    int32_t iterations = 0;
    LpStatus status = LpStatus::open;
    ISOLOAD_ROLLED
    for (bool again = true; again;) {  // a second time after a breakdown, for the split of the start
      again = status != LpStatus::broke_down;
      spread();
      if (again) status = approach(network, iterations);
      again = again && status == LpStatus::broke_down;
    }
    team_.for_each(num_parts_, [&](int k) { out.split[ws_.part_slot[k]] = copies(k); });
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

  // From the start towards the optimum.
  ISOLOAD_HD LpStatus approach(Net& network, int32_t& iterations) {
    dual_ = heaviest_burden();
    LpStatus status = judge();
    if (status != LpStatus::open) return status;
    centre();
    ISOLOAD_ROLLED
    for (;; ++iterations) {
      status = residuals();
      if (status != LpStatus::open || iterations == in_.iterations) return status;
      find_step(network);
      step();
    }
  }

  // The even split, or in proportion to speeds; M and s away from 0; prices y ~ 1 / s, so that s y = mu; the
  // largest w that leaves all x z >= mu.
  ISOLOAD_HD void centre() {
    M_ = kRoom * primal_;
    team_.for_each(ranks_.size, [&](int r) { ws_.s[r] = ws_.speed[r] * (M_ - ws_.cost[r]); });
    const Real mu = 1 / sum_(ranks_.size, [&](int r) { return ws_.speed[r] / ws_.s[r]; });
    team_.for_each(ranks_.size, [&](int r) {
      ws_.y[r] = mu / ws_.s[r];
      ws_.rank_product[r] = ws_.s[r] * ws_.y[r];
    });
    team_.sync();
    team_.for_each(experts_.size, [&](int e) {
      const Real price = experts_.least(e, [&](int k) { return ws_.y[ws_.part_rank[k]] - mu / ws_.x[k]; });
      ISOLOAD_ROLLED
      for (int k = experts_.first[e]; k < experts_.first[e + 1]; ++k) {
        ws_.z[k] = ws_.y[ws_.part_rank[k]] - price;
        ws_.product[ws_.part_place[k]] = ws_.x[k] * ws_.z[k];
      }
    });
  }

  ISOLOAD_HD void spread() {
    team_.for_each(experts_.size, [&](int e) {
      const Real speed = experts_.total(e, Real(0), [&](int k) { return ws_.speed[ws_.part_rank[k]]; });
      ISOLOAD_ROLLED
      for (int k = experts_.first[e]; k < experts_.first[e + 1]; ++k) {
        ws_.x[k] = ws_.load[e] * (ws_.speed[ws_.part_rank[k]] / speed);
      }
      scale(e);
    });
    team_.sync();
    primal_ = largest(largest_cost(0));
  }

  // What the equations lack, mu, and the certificate. Products are x z and s y.
  ISOLOAD_HD LpStatus residuals() {
    team_.sync();
    for_nodes(
        [&](int e) {
          ws_.expert_excess[e] = ws_.load[e] - scale(e);
          ws_.value[e] = ws_.load[e] * experts_.least(e, [&](int k) { return ws_.y[ws_.part_rank[k]]; });
        },
        [&](int r) {
          const Real carried = ranks_.total(r, ws_.burden[r], [&](int k) { return ws_.x[k]; });
          ws_.rank_excess[r] = ws_.speed[r] * M_ - carried - ws_.s[r];
        });
    team_.sync();
    sum_.start(Terms{num_parts_, [&](int i) { return ws_.product[i]; }},
               Terms{ranks_.size, [&](int r) { return ws_.rank_product[r]; }},
               Terms{ranks_.size, [&](int r) { return ws_.speed[r] * ws_.y[r]; }},
               Terms{ranks_.size, [&](int r) { return ws_.burden[r] * ws_.y[r]; }},
               Terms{experts_.size, [&](int e) { return ws_.value[e]; }});
    primal_ = largest(largest_cost(5 * sum_.kColumns));  // its barrier is that of the sums, too
    mu_ = mean(sum_.take(0), sum_.take(1));
    const Real prices = sum_.take(2), value = sum_.take(3) + sum_.take(4);
    price_excess_ = 1 - prices;
    const Real bound = value / prices;
    if (!finite(bound) || !finite(mu_)) return LpStatus::broke_down;
    dual_ = bound > dual_ ? bound : dual_;
    return judge();
  }

  ISOLOAD_HD LpStatus judge() const {
    if (!finite(primal_)) return LpStatus::broke_down;
    return primal_ - dual_ <= in_.tolerance * primal_ ? LpStatus::converged : LpStatus::open;
  }

  // The sum of an expert's parts, and what scales it to its load.
  ISOLOAD_HD Real scale(int e) {
    const Real sum = experts_.total(e, Real(0), [&](int k) { return ws_.x[k]; });
    ws_.scale[e] = ws_.load[e] / sum;
    return sum;
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

  // A bound without prices: what cannot move.
  ISOLOAD_HD Real heaviest_burden() {
    Real top = 0;
    team_.for_each(ranks_.size, [&](int r) {
      const Real cost = ws_.burden[r] / ws_.speed[r];
      top = cost > top ? cost : top;
    });
    return largest(top);
  }

  // Newton's step, in three rounds. First to x z = s y = 0: it is not taken, but shows how far mu can fall,
  // and what it leaves out. Then to the target. Then against rounding: parts with large conductances leave a
  // residual behind.
  ISOLOAD_HD void find_step(Net& network) {
    constexpr int kRounds = 3;
    team_.for_each(num_parts_, [&](int k) {
      ws_.conductance[k] = ws_.x[k] / ws_.z[k];
      ws_.dx[k] = 0 - ws_.x[k];
      ws_.dz[k] = 0;
    });
    team_.for_each(ranks_.size, [&](int r) {
      ws_.rank_ground[r] = ws_.s[r] / ws_.y[r];
      ws_.ds[r] = 0 - ws_.s[r];
      ws_.dy[r] = 0;
      ws_.rank_g[r] = ws_.speed[r];
    });
    team_.for_each(experts_.size, [&](int e) { ws_.expert_g[e] = 0; });
    dM_ = 0;
    const Flow<Real> flows[kFlows] = {{ws_.rank_u, ws_.expert_u}, {ws_.rank_g, ws_.expert_g}};
    ISOLOAD_ROLLED
    for (int round = 0; round < kRounds; ++round) {
      team_.sync();
      lack();
      if (round == 0)
        network.factor(ws_.conductance, ws_.rank_ground, ws_.expert_ground);
      else
        team_.sync();
      network.solve(flows, round == 0 ? 2 : 1);
      const bool last_of_step = round != 1;
      follow(round == 0, last_of_step);
      if (!last_of_step) continue;
      steepest_x_ = largest(steepest_x_);
      steepest_z_ = largest(steepest_z_);
      if (round == 0) aim();
    }
  }

  // What ranks and experts lack once the step is taken.
  ISOLOAD_HD void lack() {
    auto change = [&](int k) { return ws_.dx[k]; };
    for_nodes([&](int e) { ws_.expert_u[e] = ws_.expert_excess[e] - experts_.total(e, Real(0), change); },
              [&](int r) {
                ws_.rank_u[r] = ranks_.total(r, ws_.ds[r], change) - ws_.rank_excess[r] - ws_.speed[r] * dM_;
              });
  }

  // Changes prices and M by what ranks, experts and speed'y = 1 still lack; x z and s y stay on target. g:
  // the response of prices to a rise of M, of which `first` finds the pull. `look`: for the steepest way to a
  // zero.
  ISOLOAD_HD void follow(bool first, bool look) {
    sum_.start(Terms{ranks_.size, [&](int r) { return ws_.speed[r] * (ws_.rank_u[r] + ws_.dy[r]); }},
               Terms{ranks_.size, [&](int r) { return ws_.speed[r] * ws_.rank_g[r]; }});
    team_.sync();
    if (first) pull_ = sum_.take(1);
    const Real rise = (sum_.take(0) - price_excess_) / pull_;
    Real steepest_x = 0, steepest_z = 0;
    auto steeper = [](Real steepest, Real value, Real change) {
      const Real slope = -change / value;
      return slope > steepest ? slope : steepest;
    };
    team_.for_each(num_parts_, [&](int k) {
      const int r = ws_.part_rank[k], e = ws_.part_expert[k];
      const Real change = (ws_.rank_u[r] - ws_.expert_u[e]) - rise * (ws_.rank_g[r] - ws_.expert_g[e]);
      const Real dz = ws_.dz[k] + change, dx = ws_.dx[k] - ws_.conductance[k] * change;
      if (look) {
        steepest_x = steeper(steepest_x, ws_.x[k], dx);
        steepest_z = steeper(steepest_z, ws_.z[k], dz);
      }
      ws_.dz[k] = dz;
      ws_.dx[k] = dx;
    });
    team_.for_each(ranks_.size, [&](int r) {
      const Real change = ws_.rank_u[r] - rise * ws_.rank_g[r];
      const Real dy = ws_.dy[r] + change, ds = ws_.ds[r] - ws_.rank_ground[r] * change;
      if (look) {
        steepest_x = steeper(steepest_x, ws_.s[r], ds);
        steepest_z = steeper(steepest_z, ws_.y[r], dy);
      }
      ws_.dy[r] = dy;
      ws_.ds[r] = ds;
    });
    steepest_x_ = steepest_x, steepest_z_ = steepest_z;
    dM_ += rise;
  }

  // How far mu can fall, and the step to x z = s y = target with prices held. follow() pulls it back to the
  // other equations.
  ISOLOAD_HD void aim() {
    const Real a = reach(steepest_x_, 1), b = reach(steepest_z_, 1);
    team_.for_each(num_parts_, [&](int k) {
      ws_.product[ws_.part_place[k]] = (ws_.x[k] + a * ws_.dx[k]) * (ws_.z[k] + b * ws_.dz[k]);
    });
    team_.for_each(ranks_.size, [&](int r) {
      ws_.rank_product[r] = (ws_.s[r] + a * ws_.ds[r]) * (ws_.y[r] + b * ws_.dy[r]);
    });
    team_.sync();
    sum_.start(Terms{num_parts_, [&](int i) { return ws_.product[i]; }},
               Terms{ranks_.size, [&](int r) { return ws_.rank_product[r]; }});
    team_.sync();
    const Real ratio = mean(sum_.take(0), sum_.take(1)) / mu_;
    const Real last = kCentre * in_.tolerance * primal_ / Real(num_parts_ + ranks_.size);
    Real target = ratio * ratio * ratio * mu_;
    target = target > last ? target : last;
    team_.for_each(num_parts_, [&](int k) {
      ws_.dx[k] = (target - ws_.dx[k] * ws_.dz[k]) / ws_.z[k] - ws_.x[k];
      ws_.dz[k] = 0;
    });
    team_.for_each(ranks_.size, [&](int r) {
      ws_.ds[r] = (target - ws_.ds[r] * ws_.dy[r]) / ws_.y[r] - ws_.s[r];
      ws_.dy[r] = 0;
    });
    dM_ = 0;
  }

  // z follows its step: recomputed as y - w it would lose what x / z then magnifies.
  ISOLOAD_HD void step() {
    const Real a = reach(steepest_x_, kReach), b = reach(steepest_z_, kReach);
    team_.for_each(num_parts_, [&](int k) {
      const Real x = ws_.x[k] + a * ws_.dx[k], z = ws_.z[k] + b * ws_.dz[k];
      ws_.x[k] = x;
      ws_.z[k] = z;
      ws_.product[ws_.part_place[k]] = x * z;
    });
    team_.for_each(ranks_.size, [&](int r) {
      const Real s = ws_.s[r] + a * ws_.ds[r], y = ws_.y[r] + b * ws_.dy[r];
      ws_.s[r] = s;
      ws_.y[r] = y;
      ws_.rank_product[r] = s * y;
    });
    M_ += a * dM_;
  }

  // The step length, at most 1, that goes `share` of the way to the first zero.
  ISOLOAD_HD static Real reach(Real steepest, Real share) {
    const Real length = share / steepest;
    return length < 1 ? length : 1;
  }

  ISOLOAD_HD Real copies(int k) const { return ws_.x[k] * ws_.scale[ws_.part_expert[k]]; }
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

  ISOLOAD_HD Real mean(Real of_parts, Real of_ranks) const {
    return (of_parts + of_ranks) / Real(num_parts_ + ranks_.size);
  }

  // The largest of non-negative values, one per lane; NaN counts as the largest. As integers their bits are
  // in the same order. A barrier.
  ISOLOAD_HD Real largest(Real value) {
    using Bits = std::conditional_t<sizeof(Real) == 4, int32_t, int64_t>;
    constexpr Bits kNoSign = ~uint64_t(0) >> (65 - 8 * sizeof(Bits));
    Bits bits;
    std::memcpy(&bits, &value, sizeof bits);
    bits = static_cast<Bits>(team_.max(bits & kNoSign));
    std::memcpy(&value, &bits, sizeof bits);
    return value;
  }

  Team& team_;
  const LpProblem<Real>& in_;
  const LpWorkspace<Real>& ws_;
  OrderedSum<Real, Team> sum_;
  NetworkSide ranks_{}, experts_{};
  int num_parts_ = 0;
  Real M_ = 0, dM_ = 0, mu_ = 0, primal_ = 0, dual_ = 0;
  Real price_excess_ = 0, pull_ = 0;      // 1 - speed'y; speed'g
  Real steepest_x_ = 0, steepest_z_ = 0;  // of this lane's parts and ranks, ways to a first zero
};

// kMostRanks: where none has more, the mesh is one of columns, else 0.
template <class Real, int kMostRanks = 0>
struct LpPlanner {  // see planner.h
  using Problem = LpProblem<Real>;
  using Result = LpResult<Real>;
  static constexpr bool kSets = false;

  ISOLOAD_HD static void select(Problem& in, Result& out, int64_t b) {
    const int64_t E = in.E, R = in.R, P = R * in.S;
    in.tables = in.tables.layer(b, E, P);
    in.loads += b * in.num_sources * E;
    if (in.base) in.base += b * R;
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
