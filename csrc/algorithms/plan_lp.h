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

#include "algorithms/network.h"
#include "algorithms/ordered_sum.h"
#include "algorithms/plan_lp_parts.h"
#include "host_device.h"
#include "planner.h"

namespace isoload {

enum class LpStatus : int32_t { converged = 0, open = 1, broke_down = 2 };

template <class Real>
struct LpResult {
  Real* split;          // [P] copies per slot
  Real *primal, *dual;  // [1] largest rank cost of the split; proved lower bound
  int32_t *iterations, *status;
};

template <class Real, class Team>
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
    Network<Real, Team> network(team_, sum_, ranks_, experts_, ws_.network);
    int32_t iterations = 0;
    spread();
    dual_ = heaviest_burden();
    LpStatus status = judge();
    if (status == LpStatus::open) status = centre();
    while (status == LpStatus::open && iterations < in_.iterations) {
      factor(network);
      predict(network);
      correct(network);
      step();
      status = residuals();
      ++iterations;
    }
    if (status == LpStatus::broke_down) spread();
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
  using Net = Network<Real, Team>;
  static constexpr Real kRoom = Real(1.1);     // M at the start, in largest costs
  static constexpr Real kReach = Real(0.999);  // how much of the way to a zero a step goes
  static constexpr Real kCentre = Real(0.2);   // the gap aimed at last, in tolerances

  // The even split, or in proportion to speeds; M and s away from 0; prices y ~ 1 / s, so that s y = mu; the
  // largest w that leaves all x z >= mu.
  ISOLOAD_HD LpStatus centre() {
    M_ = kRoom * primal_;
    team_.for_each(ranks_.size, [&](int r) { ws_.s[r] = ws_.speed[r] * (M_ - ws_.cost[r]); });
    const Real mu = 1 / sum_(ranks_.size, [&](int r) { return ws_.speed[r] / ws_.s[r]; });
    team_.for_each(ranks_.size, [&](int r) { ws_.y[r] = mu / ws_.s[r]; });
    team_.sync();
    team_.for_each(experts_.size, [&](int e) {
      const Real price = least(e, [&](int k) { return ws_.y[ws_.part_rank[k]] - mu / ws_.x[k]; });
      for (int i = experts_.first[e]; i < experts_.first[e + 1]; ++i) {
        const int k = experts_.list[i];
        ws_.z[k] = ws_.y[ws_.part_rank[k]] - price;
      }
    });
    return residuals();
  }

  ISOLOAD_HD void spread() {
    team_.for_each(experts_.size, [&](int e) {
      const Real speed = total(experts_, e, 0, [&](int k) { return ws_.speed[ws_.part_rank[k]]; });
      for (int i = experts_.first[e]; i < experts_.first[e + 1]; ++i) {
        const int k = experts_.list[i];
        ws_.x[k] = ws_.load[e] * (ws_.speed[ws_.part_rank[k]] / speed);
      }
    });
    find_primal();
  }

  // What the equations lack, mu, and the certificate.
  ISOLOAD_HD LpStatus residuals() {
    find_primal();
    team_.for_each(experts_.size, [&](int e) {
      ws_.expert_excess[e] = ws_.load[e] - total(experts_, e, 0, [&](int k) { return ws_.x[k]; });
      ws_.value[e] = ws_.load[e] * least(e, [&](int k) { return ws_.y[ws_.part_rank[k]]; });
    });
    team_.for_each(ranks_.size, [&](int r) {
      const Real carried = total(ranks_, r, ws_.burden[r], [&](int k) { return ws_.x[k]; });
      ws_.rank_excess[r] = ws_.speed[r] * M_ - carried - ws_.s[r];
    });
    mu_ = mean([&](int k) { return ws_.x[k] * ws_.z[k]; }, [&](int r) { return ws_.s[r] * ws_.y[r]; });
    const Real prices = sum_(ranks_.size, [&](int r) { return ws_.speed[r] * ws_.y[r]; });
    const Real value = sum_(ranks_.size, [&](int r) { return ws_.burden[r] * ws_.y[r]; }) +
                       sum_(experts_.size, [&](int e) { return ws_.value[e]; });
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

  // The largest cost of the split, with every expert's parts scaled to its load.
  ISOLOAD_HD void find_primal() {
    team_.sync();
    team_.for_each(experts_.size, [&](int e) {
      ws_.scale[e] = ws_.load[e] / total(experts_, e, 0, [&](int k) { return ws_.x[k]; });
    });
    team_.sync();
    Real top = 0;
    team_.for_each(ranks_.size, [&](int r) {
      ws_.cost[r] = total(ranks_, r, ws_.burden[r], [&](int k) { return copies(k); }) / ws_.speed[r];
      top = ws_.cost[r] <= top ? top : ws_.cost[r];  // keeps NaN
    });
    primal_ = largest(top);
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

  // The network of this iteration, and the response g of its prices to a rise of M.
  ISOLOAD_HD void factor(Net& network) {
    team_.for_each(num_parts_, [&](int k) {
      ws_.conductance[k] = ws_.x[k] / ws_.z[k];
      ws_.cross[k] = 0;
    });
    team_.for_each(ranks_.size, [&](int r) {
      ws_.rank_ground[r] = ws_.s[r] / ws_.y[r];
      ws_.rank_cross[r] = 0;
      ws_.rank_g[r] = ws_.speed[r];
    });
    team_.for_each(experts_.size, [&](int e) { ws_.expert_g[e] = 0; });
    network.factor(ws_.conductance, ws_.rank_ground, ws_.expert_ground);
    network.solve(ws_.rank_g, ws_.expert_g);
    pull_ = sum_(ranks_.size, [&](int r) { return ws_.speed[r] * ws_.rank_g[r]; });
  }

  // Newton's step to x z = s y = 0 is not taken: it shows how far mu can fall, and what it leaves out.
  ISOLOAD_HD void predict(Net& network) {
    aim(0);
    restore(network);
    const Real a = reach(ws_.x, ws_.dx, ws_.s, ws_.ds, 1), b = reach(ws_.z, ws_.dz, ws_.y, ws_.dy, 1);
    const Real left = mean([&](int k) { return (ws_.x[k] + a * ws_.dx[k]) * (ws_.z[k] + b * ws_.dz[k]); },
                           [&](int r) { return (ws_.s[r] + a * ws_.ds[r]) * (ws_.y[r] + b * ws_.dy[r]); });
    const Real ratio = left / mu_, last = kCentre * in_.tolerance * primal_ / Real(num_parts_ + ranks_.size);
    target_ = ratio * ratio * ratio * mu_;
    target_ = target_ > last ? target_ : last;
    team_.for_each(num_parts_, [&](int k) { ws_.cross[k] = ws_.dx[k] * ws_.dz[k]; });
    team_.for_each(ranks_.size, [&](int r) { ws_.rank_cross[r] = ws_.ds[r] * ws_.dy[r]; });
  }

  ISOLOAD_HD void correct(Net& network) {
    aim(target_);
    restore(network);
    restore(network);  // against rounding: parts with large conductances leave a residual behind
  }

  // z follows its step: recomputed as y - w it would lose what x / z then magnifies.
  ISOLOAD_HD void step() {
    const Real a = reach(ws_.x, ws_.dx, ws_.s, ws_.ds, kReach);
    const Real b = reach(ws_.z, ws_.dz, ws_.y, ws_.dy, kReach);
    team_.for_each(num_parts_, [&](int k) {
      ws_.x[k] += a * ws_.dx[k];
      ws_.z[k] += b * ws_.dz[k];
    });
    team_.for_each(ranks_.size, [&](int r) {
      ws_.s[r] += a * ws_.ds[r];
      ws_.y[r] += b * ws_.dy[r];
    });
    M_ += a * dM_;
  }

  // The step to x z = s y = target with prices held; restore() then pulls it back to the other equations.
  ISOLOAD_HD void aim(Real target) {
    team_.for_each(num_parts_, [&](int k) {
      ws_.dx[k] = (target - ws_.cross[k]) / ws_.z[k] - ws_.x[k];
      ws_.dz[k] = 0;
    });
    team_.for_each(ranks_.size, [&](int r) {
      ws_.ds[r] = (target - ws_.rank_cross[r]) / ws_.y[r] - ws_.s[r];
      ws_.dy[r] = 0;
    });
    dM_ = 0;
  }

  // Changes prices and M by what ranks, experts and speed'y = 1 still lack; x z and s y stay on target.
  ISOLOAD_HD void restore(Net& network) {
    team_.sync();
    auto change = [&](int k) { return ws_.dx[k]; };
    team_.for_each(ranks_.size, [&](int r) {
      ws_.rank_u[r] = total(ranks_, r, ws_.ds[r], change) - ws_.rank_excess[r] - ws_.speed[r] * dM_;
    });
    team_.for_each(experts_.size,
                   [&](int e) { ws_.expert_u[e] = ws_.expert_excess[e] - total(experts_, e, 0, change); });
    network.solve(ws_.rank_u, ws_.expert_u);
    const Real prices = sum_(ranks_.size, [&](int r) { return ws_.speed[r] * (ws_.rank_u[r] + ws_.dy[r]); });
    const Real rise = (prices - price_excess_) / pull_;
    team_.for_each(num_parts_, [&](int k) {
      const int r = ws_.part_rank[k], e = ws_.part_expert[k];
      const Real dz = (ws_.rank_u[r] - ws_.expert_u[e]) - rise * (ws_.rank_g[r] - ws_.expert_g[e]);
      ws_.dz[k] += dz;
      ws_.dx[k] -= ws_.conductance[k] * dz;
    });
    team_.for_each(ranks_.size, [&](int r) {
      const Real dy = ws_.rank_u[r] - rise * ws_.rank_g[r];
      ws_.dy[r] += dy;
      ws_.ds[r] -= ws_.rank_ground[r] * dy;
    });
    dM_ += rise;
  }

  // The step length, at most 1, that takes (v, w) `share` of the way along (dv, dw) to a first zero.
  ISOLOAD_HD Real reach(const Real* v, const Real* dv, const Real* w, const Real* dw, Real share) {
    Real steepest = 0;
    auto look = [&](Real value, Real change) {
      const Real slope = -change / value;
      steepest = slope > steepest ? slope : steepest;
    };
    team_.for_each(num_parts_, [&](int k) { look(v[k], dv[k]); });
    team_.for_each(ranks_.size, [&](int r) { look(w[r], dw[r]); });
    const Real length = share / largest(steepest);
    return length < 1 ? length : 1;
  }

  ISOLOAD_HD Real copies(int k) const { return ws_.x[k] * ws_.scale[ws_.part_expert[k]]; }
  ISOLOAD_HD static bool finite(Real value) { return value - value == 0; }

  // sum + term(k) over the parts k of a rank or an expert.
  template <class F>
  ISOLOAD_HD static Real total(const NetworkSide& side, int node, Real sum, F&& term) {
    for (int i = side.first[node]; i < side.first[node + 1]; ++i) sum += term(side.list[i]);
    return sum;
  }

  template <class F>
  ISOLOAD_HD Real least(int e, F&& term) const {
    Real least = term(experts_.list[experts_.first[e]]);
    for (int i = experts_.first[e] + 1; i < experts_.first[e + 1]; ++i) {
      const Real value = term(experts_.list[i]);
      least = value < least ? value : least;
    }
    return least;
  }

  template <class F, class G>
  ISOLOAD_HD Real mean(F&& of_part, G&& of_rank) {
    return (sum_(num_parts_, of_part) + sum_(ranks_.size, of_rank)) / Real(num_parts_ + ranks_.size);
  }

  // The largest of non-negative values, one per lane; NaN counts as the largest. As integers their bits are
  // in the same order.
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
  Real M_ = 0, dM_ = 0, mu_ = 0, target_ = 0, primal_ = 0, dual_ = 0;
  Real price_excess_ = 0, pull_ = 0;  // 1 - speed'y; speed'g
};

template <class Real>
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
