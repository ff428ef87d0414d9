// Network: potentials of a resistor network with two sides, factored once and solved for many currents.
//
// Every edge joins a node of one side to one of the other and conducts; a node may also conduct to ground. In
// equations, for every node i: ground_i u_i + sum over its edges of conductance (u_i - u_other) = current_i.
// The nodes of one side (hubs) touch only the other side (kept), so they go first; what is left is dense in
// the kept nodes alone. Nodes are eliminated as stars are turned into meshes: conductances and grounds stay
// non-negative numbers that are only added, never subtracted (the GTH trick for M-matrices), so the factors
// keep small relative errors however ill-conditioned the network is.
#pragma once

#include <cstdint>

#include "algorithms/ordered_sum.h"

namespace isoload {

// One side: node i's edges are list[first[i] .. first[i+1]), and node[k] is the end of edge k.
struct NetworkSide {
  int size;
  const int32_t *first, *list, *node;
};

template <class Real>
struct NetworkWorkspace {
  Real *mesh, *ground, *inverse;  // [kept, kept], [kept], [kept]
  Real *star, *part;              // [hubs] all that a hub conducts; [edges] an edge's part of its hub's
};

template <class Real, class Team>
class Network {
 public:
  Network(Team& team, OrderedSum<Real, Team>& sum, NetworkSide left, NetworkSide right,
          NetworkWorkspace<Real> workspace)
      : team_(team),
        sum_(sum),
        left_kept_(left.size <= right.size),
        kept_(left_kept_ ? left : right),
        hubs_(left_kept_ ? right : left),
        ws_(workspace),
        n_(kept_.size) {}

  // conductance [edges], grounds per node. A barrier first and last.
  void factor(const Real* conductance, const Real* left_ground, const Real* right_ground) {
    conductance_ = conductance;
    const Real* kept_ground = left_kept_ ? left_ground : right_ground;
    const Real* hub_ground = left_kept_ ? right_ground : left_ground;
    team_.sync();
    team_.for_each(hubs_.size, [&](int h) {
      Real star = hub_ground[h];
      for (int i = hubs_.first[h]; i < hubs_.first[h + 1]; ++i) star += conductance[hubs_.list[i]];
      ws_.star[h] = star;
      for (int i = hubs_.first[h]; i < hubs_.first[h + 1]; ++i)
        ws_.part[hubs_.list[i]] = conductance[hubs_.list[i]] / star;
    });
    team_.sync();
    team_.for_each(n_, [&](int a) { mesh_row(a, kept_ground[a], hub_ground); });
    for (int k = 0; k < n_; ++k) eliminate(k);
    team_.sync();
  }

  // Currents in, potentials out, per node. A barrier first and last.
  void solve(Real* left, Real* right) {
    Real *kept = left_kept_ ? left : right, *hub = left_kept_ ? right : left;
    team_.sync();
    team_.for_each(n_, [&](int a) {
      Real current = kept[a];
      for (int i = kept_.first[a]; i < kept_.first[a + 1]; ++i) {
        const int k = kept_.list[i];
        current += ws_.part[k] * hub[hubs_.node[k]];
      }
      kept[a] = current;
    });
    team_.sync();
    for (int k = 0; k < n_; ++k) {
      const Real* row = ws_.mesh + int64_t(k) * n_;
      const Real potential = kept[k] * ws_.inverse[k];
      team_.for_each(n_ - k - 1, [&](int i) { kept[k + 1 + i] += row[k + 1 + i] * potential; });
      team_.sync();
    }
    team_.for_each(n_, [&](int k) { kept[k] *= ws_.inverse[k]; });
    team_.sync();
    for (int k = n_ - 1; k > 0; --k) {
      const Real* row = ws_.mesh + int64_t(k) * n_;
      const Real potential = kept[k];
      team_.for_each(k, [&](int i) { kept[i] += row[i] * potential; });
      team_.sync();
    }
    team_.for_each(hubs_.size, [&](int h) {
      Real current = hub[h];
      for (int i = hubs_.first[h]; i < hubs_.first[h + 1]; ++i) {
        const int k = hubs_.list[i];
        current += conductance_[k] * kept[kept_.node[k]];
      }
      hub[h] = current / ws_.star[h];
    });
    team_.sync();
  }

 private:
  // Row a of the mesh that remains of the stars, right of the diagonal, and a's way to ground.
  void mesh_row(int a, Real ground, const Real* hub_ground) {
    Real* row = ws_.mesh + int64_t(a) * n_;
    for (int b = a + 1; b < n_; ++b) row[b] = 0;
    for (int i = kept_.first[a]; i < kept_.first[a + 1]; ++i) {
      const int k = kept_.list[i], h = hubs_.node[k];
      ground += ws_.part[k] * hub_ground[h];
      for (int j = hubs_.first[h]; j < hubs_.first[h + 1]; ++j) {
        const int l = hubs_.list[j], b = kept_.node[l];
        if (b > a) row[b] += ws_.part[k] * conductance_[l];
      }
    }
    ws_.ground[a] = ground;
  }

  // Turns node k's star into a mesh. Row k keeps its conductances right of the diagonal; left of the diagonal
  // of the rows below stands the part of k's potential that each takes over.
  void eliminate(int k) {
    const Real* row = ws_.mesh + int64_t(k) * n_;
    const int below = n_ - k - 1;
    const Real conducted = sum_(below, [&](int i) { return row[k + 1 + i]; });  // the barrier after row k - 1
    const Real inverse = 1 / (ws_.ground[k] + conducted);
    if (team_.rank() == 0) ws_.inverse[k] = inverse;
    team_.for_each(below, [&](int m) {
      const int i = k + 1 + m;
      Real* other = ws_.mesh + int64_t(i) * n_;
      const Real part = row[i] * inverse;
      ws_.ground[i] += part * ws_.ground[k];
      for (int j = i + 1; j < n_; ++j) other[j] += part * row[j];
      other[k] = part;
    });
  }

  Team& team_;
  OrderedSum<Real, Team>& sum_;
  const bool left_kept_;
  const NetworkSide kept_, hubs_;
  const NetworkWorkspace<Real> ws_;
  const int n_;
  const Real* conductance_ = nullptr;
};

}  // namespace isoload
