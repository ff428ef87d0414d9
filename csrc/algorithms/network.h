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
#include "host_device.h"

namespace isoload {

// One side: node i's edges are list[first[i] .. first[i+1]), and node[k] is the end of edge k.
struct NetworkSide {
  int size;
  const int32_t *first, *list, *node;
};

template <class Real>
struct NetworkWorkspace {
  Real* mesh;                    // [kept, row_length(kept)]
  Real *ground, *inverse, *own;  // [kept]; own: what a node's potential is without the nodes after it
  Real *star, *part;             // [hubs] all that a hub conducts; [edges] an edge's part of its hub's
};

// Odd, so that lanes that go down a column of the mesh hit different banks of a GPU's shared memory.
ISOLOAD_HD constexpr int64_t row_length(int64_t n) { return n | 1; }

template <class Real, class Team>
class Network {
 public:
  ISOLOAD_HD Network(Team& team, OrderedSum<Real, Team>& sum, NetworkSide left, NetworkSide right,
                     NetworkWorkspace<Real> workspace)
      : team_(team),
        sum_(sum),
        left_kept_(left.size <= right.size),
        kept_(left_kept_ ? left : right),
        hubs_(left_kept_ ? right : left),
        ws_(workspace),
        n_(kept_.size) {}

  // conductance [edges], grounds per node. A barrier first and last.
  ISOLOAD_HD void factor(const Real* conductance, const Real* left_ground, const Real* right_ground) {
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
  ISOLOAD_HD void solve(Real* left, Real* right) {
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
    const int last_tile = (n_ - 1) / kTile * kTile;
    for (int first = 0; first < n_; first += kTile) descend(first, kept);
    for (int first = last_tile; first >= 0; first -= kTile) ascend(first, kept);
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
  static constexpr int kTile = 16;   // nodes whose triangle is inverted
  static constexpr int kPieces = 4;  // lanes per row of an elimination

  ISOLOAD_HD Real* row_of(int k) const { return ws_.mesh + int64_t(k) * row_length(n_); }
  ISOLOAD_HD int end_of(int first) const { return first + kTile < n_ ? first + kTile : n_; }

  // Row a of the mesh that remains of the stars, right of the diagonal, and a's way to ground.
  ISOLOAD_HD void mesh_row(int a, Real ground, const Real* hub_ground) {
    Real* row = row_of(a);
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

  // Turns node k's star into a mesh. Row k keeps its conductances right of the diagonal. In the rows below,
  // column k takes the part of k's potential that each gets; within a tile, of k's current, on all ways
  // there: the inverse of the tile's triangle, so that a solve has one step per tile instead of one per node.
  ISOLOAD_HD void eliminate(int k) {
    const Real* row = row_of(k);
    const int below = n_ - k - 1, tile = k / kTile * kTile, tile_end = end_of(tile);
    const Real conducted = sum_(below, [&](int i) { return row[k + 1 + i]; });  // the barrier after row k - 1
    const Real inverse = 1 / (ws_.ground[k] + conducted);
    if (team_.rank() == 0) ws_.inverse[k] = inverse;
    const int pieces = team_.size() == 1 ? 1 : kPieces;
    team_.for_each(below * pieces, [&](int m) {
      const int i = k + 1 + m / pieces, piece = m % pieces;
      Real* other = row_of(i);
      const Real part = row[i] * inverse;
      if (piece == 0) ws_.ground[i] += part * ws_.ground[k], other[k] = part;
      for (int j = i + 1 + piece; j < n_; j += pieces) other[j] += part * row[j];
      for (int j = tile + piece; i < tile_end && j < k; j += pieces) other[j] += part * row[j];
    });
  }

  // From currents to what the tile's nodes have on their own, which flows on to the nodes after the tile.
  ISOLOAD_HD void descend(int first, Real* kept) {
    const int end = end_of(first);
    team_.for_each(end - first, [&](int m) {
      const Real* row = row_of(first + m);
      Real current = kept[first + m];
      for (int j = first; j < first + m; ++j) current += row[j] * kept[j];
      ws_.own[first + m] = current * ws_.inverse[first + m];
    });
    team_.sync();
    if (end == n_) return;
    for (int k = first; k < end; ++k) {  // a lane keeps its nodes, so no barrier between rows
      const Real* __restrict row = row_of(k) + end;
      Real* __restrict after = kept + end;
      const Real own = ws_.own[k];
      team_.for_each(n_ - end, [&](int i) { after[i] += row[i] * own; });
    }
    team_.sync();
  }

  // From what the tile's nodes have, with that of the nodes after it, to potentials; they go on to the nodes
  // before.
  ISOLOAD_HD void ascend(int first, Real* kept) {
    const int end = end_of(first);
    team_.for_each(end - first, [&](int m) {
      Real potential = ws_.own[first + m];
      for (int k = first + m + 1; k < end; ++k) potential += row_of(k)[first + m] * ws_.own[k];
      kept[first + m] = potential;
    });
    team_.sync();
    if (first == 0) return;
    for (int k = first; k < end; ++k) {
      const Real* __restrict row = row_of(k);
      Real* __restrict before = ws_.own;
      const Real potential = kept[k];
      team_.for_each(first, [&](int i) { before[i] += row[i] * potential; });
    }
    team_.sync();
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
