// plan_lp: the real-valued split with the least largest rank cost, by an interior point method.
//
//   minimise M   subject to   sum of an expert's parts x = its load               (price w)
//                             rank's burden + its parts + slack s = speed * M     (price y)
//                             x >= 0, s >= 0
// At the optimum speed'y = 1, y >= 0, reduced costs z = y - w >= 0, and x z = s y = 0. The method walks there
// along x z = s y = mu, mu falling: Mehrotra's predictor and corrector. It starts strictly feasible and almost
// centred, so no big-M is needed. Newton's equations are a resistor network between ranks and experts with
// conductances x / z (network.h), which makes the method small, and accurate in float32. Any y >= 0 proves a
// bound on M, so dual is true whatever the iterations did.
//
// The same bits on every rank, team and device: sums have a fixed order, nothing is contracted.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "algorithms/network.h"
#include "algorithms/ordered_sum.h"
#include "algorithms/plan_lp_parts.h"

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
  LpSolver(Team& team, const LpProblem<Real>& problem, const LpWorkspace<Real>& workspace)
      : team_(team), in_(problem), ws_(workspace), sum_(team, workspace.columns) {}

  // False if the problem cannot be solved, see LpParts::list.
  bool solve(const LpResult<Real>& out) {
    LpParts<Real, Team> parts(team_, in_, ws_, out.split);
    if (!parts.list()) return false;
    ranks_ = parts.ranks();
    experts_ = parts.experts();
    num_parts_ = parts.size();
    Network<Real, Team> network(team_, sum_, ranks_, experts_, ws_.network);
    int32_t iterations = 0;
    start_even();
    dual_ = heaviest_burden();
    judge();
    if (status_ == LpStatus::open && in_.iterations > 0) centre();
    while (status_ == LpStatus::open && iterations < in_.iterations) {
      factor(network);
      predict(network);
      correct(network);
      step();
      residuals();
      ++iterations;
    }
    if (status_ == LpStatus::broke_down) start_even();
    team_.for_each(num_parts_,
                   [&](int k) { out.split[ws_.part_slot[k]] = ws_.x[k] * ws_.scale[ws_.part_expert[k]]; });
    if (team_.rank() == 0) {
      *out.primal = primal_;
      *out.dual = dual_;
      *out.iterations = iterations;
      *out.status = static_cast<int32_t>(status_);
    }
    team_.sync();
    return true;
  }

 private:
  using Net = Network<Real, Team>;
  static constexpr Real kReach = Real(0.999);  // of the way to the boundary
  static constexpr Real kRoom = Real(1.1);             // M at the start, in largest costs

  template <class F>
  Real over_parts(const NetworkSide& side, int node, Real sum, F&& term) const {
    for (int i = side.first[node]; i < side.first[node + 1]; ++i) sum += term(side.list[i]);
    return sum;
  }

  // The largest of non-negative values, one per lane; NaN counts as the largest.
  Real largest(Real value) {
    using Bits = std::conditional_t<sizeof(Real) == 4, int32_t, int64_t>;
    Bits bits;
    value = value < 0 ? -value : value;
    std::memcpy(&bits, &value, sizeof bits);
    bits = static_cast<Bits>(team_.max(bits & std::numeric_limits<Bits>::max()));
    std::memcpy(&value, &bits, sizeof bits);
    return value;
  }

  Real heaviest_burden() {
    Real top = 0;
    team_.for_each(ranks_.size, [&](int r) {
      const Real cost = ws_.burden[r] / ws_.speed[r];
      top = cost > top ? cost : top;
    });
    return largest(top);
  }

  void judge() {
    const Real gap = primal_ - dual_;
    status_ = gap <= in_.tolerance * primal_ ? LpStatus::converged
              : gap - gap == 0 ? LpStatus::open : LpStatus::broke_down;
  }

  // M and s far from 0; y ~ 1 / s, so that s y = mu; z >= mu / x.
  void centre() {
    M_ = kRoom * primal_;
    team_.for_each(ranks_.size, [&](int r) { ws_.s[r] = ws_.speed[r] * M_ - ws_.cost[r] * ws_.speed[r]; });
    const Real mu = 1 / sum_(ranks_.size, [&](int r) { return ws_.speed[r] / ws_.s[r]; });
    team_.for_each(ranks_.size, [&](int r) { ws_.y[r] = mu / ws_.s[r]; });
    team_.sync();
    team_.for_each(experts_.size, [&](int e) {
      const Real price = least_of(e, [&](int k) { return ws_.y[ws_.part_rank[k]] - mu / ws_.x[k]; });
      for (int i = experts_.first[e]; i < experts_.first[e + 1]; ++i) {
        const int k = experts_.list[i];
        ws_.z[k] = ws_.y[ws_.part_rank[k]] - price;
      }
    });
    residuals();
  }

  void start_even() {
    team_.for_each(experts_.size, [&](int e) {
      const Real speed = over_parts(experts_, e, 0, [&](int k) { return ws_.speed[ws_.part_rank[k]]; });
      for (int i = experts_.first[e]; i < experts_.first[e + 1]; ++i) {
        const int k = experts_.list[i];
        ws_.x[k] = ws_.load[e] * (ws_.speed[ws_.part_rank[k]] / speed);
      }
      ws_.scale[e] = 1;
    });
    team_.sync();
    find_primal();
  }

  template <class F>
  Real least_of(int e, F&& term) const {
    Real least = term(experts_.list[experts_.first[e]]);
    for (int i = experts_.first[e] + 1; i < experts_.first[e + 1]; ++i) {
      const Real value = term(experts_.list[i]);
      least = value < least ? value : least;
    }
    return least;
  }

  // The largest cost of the split, every expert's parts scaled to its load.
  void find_primal() {
    Real top = 0;
    team_.for_each(ranks_.size, [&](int r) {
      auto copies = [&](int k) { return ws_.x[k] * ws_.scale[ws_.part_expert[k]]; };
      ws_.cost[r] = over_parts(ranks_, r, ws_.burden[r], copies) / ws_.speed[r];
      top = ws_.cost[r] > top || ws_.cost[r] != ws_.cost[r] ? ws_.cost[r] : top;
    });
    primal_ = largest(top);
  }

  // What the equations lack, the certificate, and whether it suffices.
  void residuals() {
    team_.sync();
    team_.for_each(experts_.size, [&](int e) {
      const Real parts = over_parts(experts_, e, 0, [&](int k) { return ws_.x[k]; });
      ws_.expert_excess[e] = ws_.load[e] - parts;
      ws_.scale[e] = ws_.load[e] / parts;
      ws_.value[e] = ws_.load[e] * least_of(e, [&](int k) { return ws_.y[ws_.part_rank[k]]; });
    });
    team_.for_each(ranks_.size, [&](int r) {
      const Real carried = over_parts(ranks_, r, ws_.burden[r], [&](int k) { return ws_.x[k]; });
      ws_.rank_excess[r] = ws_.speed[r] * M_ - carried - ws_.s[r];
    });
    team_.sync();
    find_primal();
    const Real prices = sum_(ranks_.size, [&](int r) { return ws_.speed[r] * ws_.y[r]; });
    const Real value = sum_(ranks_.size, [&](int r) { return ws_.burden[r] * ws_.y[r]; }) +
                       sum_(experts_.size, [&](int e) { return ws_.value[e]; });
    price_excess_ = 1 - prices;
    mu_ = (sum_(num_parts_, [&](int k) { return ws_.x[k] * ws_.z[k]; }) +
           sum_(ranks_.size, [&](int r) { return ws_.s[r] * ws_.y[r]; })) /
          Real(num_parts_ + ranks_.size);
    const Real bound = value / prices;
    dual_ = bound > dual_ ? bound : dual_;
    judge();
    if (!(mu_ > 0) || bound - bound != 0) status_ = LpStatus::broke_down;
  }

  void factor(Net& network) {
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

  // Newton's step to x z = s y = 0, to see how far it would reach.
  void predict(Net& network) {
    direct(network, 0);
    const Real primal = reach(ws_.x, ws_.dx, ws_.s, ws_.ds), dual = reach(ws_.z, ws_.dz, ws_.y, ws_.dy);
    const Real a = primal > 1 ? 1 : primal, b = dual > 1 ? 1 : dual;
    const Real left = (sum_(num_parts_, [&](int k) {
                         return (ws_.x[k] + a * ws_.dx[k]) * (ws_.z[k] + b * ws_.dz[k]);
                       }) +
                       sum_(ranks_.size, [&](int r) {
                         return (ws_.s[r] + a * ws_.ds[r]) * (ws_.y[r] + b * ws_.dy[r]);
                       })) /
                      Real(num_parts_ + ranks_.size);
    const Real ratio = left / mu_;
    target_ = ratio * ratio * ratio * mu_;
    const Real floor = Real(0.2) * in_.tolerance * primal_ / Real(num_parts_ + ranks_.size);
    target_ = target_ > floor ? target_ : floor;
  }

  // The step that is taken: to x z = s y = target, corrected by the products that the predictor left out.
  void correct(Net& network) {
    team_.for_each(num_parts_, [&](int k) { ws_.cross[k] = ws_.dx[k] * ws_.dz[k]; });
    team_.for_each(ranks_.size, [&](int r) { ws_.rank_cross[r] = ws_.ds[r] * ws_.dy[r]; });
    direct(network, target_);
  }

  void step() {
    const Real primal = kReach * reach(ws_.x, ws_.dx, ws_.s, ws_.ds);
    const Real dual = kReach * reach(ws_.z, ws_.dz, ws_.y, ws_.dy);
    const Real a = primal > 1 ? 1 : primal, b = dual > 1 ? 1 : dual;
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

  // How many steps of (dv, dw) lie between (v, w) and a first zero.
  Real reach(const Real* v, const Real* dv, const Real* w, const Real* dw) {
    Real steepest = 0;
    auto look = [&](Real value, Real change) {
      const Real slope = -change / value;
      steepest = slope > steepest ? slope : steepest;
    };
    team_.for_each(num_parts_, [&](int k) { look(v[k], dv[k]); });
    team_.for_each(ranks_.size, [&](int r) { look(w[r], dw[r]); });
    return 1 / largest(steepest);
  }

  // The step to x z = s y = target: first as if nothing else held, then twice (the second time against
  // rounding) pulled back to the equations of ranks, experts and prices.
  void direct(Net& network, Real target) {
    team_.for_each(num_parts_, [&](int k) {
      ws_.dx[k] = (target - ws_.cross[k]) / ws_.z[k] - ws_.x[k];
      ws_.dz[k] = 0;
    });
    team_.for_each(ranks_.size, [&](int r) {
      ws_.ds[r] = (target - ws_.rank_cross[r]) / ws_.y[r] - ws_.s[r];
      ws_.dy[r] = 0;
    });
    dM_ = 0;
    restore(network);
    restore(network);
  }

  void restore(Net& network) {
    team_.sync();
    auto change = [&](int k) { return ws_.dx[k]; };
    team_.for_each(ranks_.size, [&](int r) {
      ws_.rank_u[r] = over_parts(ranks_, r, ws_.ds[r], change) - ws_.rank_excess[r] - ws_.speed[r] * dM_;
    });
    team_.for_each(experts_.size, [&](int e) {
      ws_.expert_u[e] = ws_.expert_excess[e] - over_parts(experts_, e, 0, change);
    });
    network.solve(ws_.rank_u, ws_.expert_u);
    const Real prices =
        sum_(ranks_.size, [&](int r) { return ws_.speed[r] * (ws_.rank_u[r] + ws_.dy[r]); });
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

  Team& team_;
  const LpProblem<Real>& in_;
  const LpWorkspace<Real>& ws_;
  OrderedSum<Real, Team> sum_;
  NetworkSide ranks_{}, experts_{};
  int num_parts_ = 0;
  LpStatus status_ = LpStatus::open;
  Real M_ = 0, dM_ = 0, mu_ = 0, target_ = 0, primal_ = 0, dual_ = 0;
  Real price_excess_ = 0, pull_ = 0;  // 1 - speed'y; speed'g
};

}  // namespace isoload
