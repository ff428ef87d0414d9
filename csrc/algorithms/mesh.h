// Mesh: a resistor network in which every node may be joined to every other, of any size, by a team.
//
// Nodes are eliminated as stars are turned into meshes: conductances and grounds stay non-negative numbers
// that are only added, never subtracted (the GTH trick for M-matrices), so the factors keep small relative
// errors however ill-conditioned the network is.
#pragma once

#include <cstdint>

#include "algorithms/ordered_sum.h"
#include "host_device.h"
#include "packs.h"

namespace isoload {

// One side of a network: node i's edges are edge(first[i] .. first[i+1]), and node[k] is the end of edge k.
struct NetworkSide {
  int size;
  const int32_t *first, *list, *node;  // no list: as they are numbered

  ISOLOAD_HD int edge(int i) const { return list == nullptr ? i : list[i]; }

  // sum + term(k) over the edges k of a node, in their order.
  template <class Real, class F>
  ISOLOAD_HD Real total(int node, Real sum, F&& term) const {
    ISOLOAD_ROLLED
    for (int i = first[node]; i < first[node + 1]; ++i) sum += term(edge(i));
    return sum;
  }

  // The least term(k) of a node's edges, of which there are some.
  template <class Real, class F>
  ISOLOAD_HD Real least(int node, F&& term) const {
    Real least = 0;
    ISOLOAD_ROLLED
    for (int i = first[node]; i < first[node + 1]; ++i) {
      const Real value = term(edge(i));
      least = i == first[node] || value < least ? value : least;
    }
    return least;
  }
};

template <class Real>
struct MeshWorkspace {
  Real* rows;                    // [n, row_length(n)]
  Real *ground, *inverse, *own;  // [n]; own: what a node's potential is without the nodes after it
  // Of a ColumnMesh.
  Real *columns, *triangles;  // [tiles, n, column_length], [n, column_length]
  Real *row, *owns;           // [2, kMostColumns] of a step; [kFlows, kMostColumns] own of each current
  uint64_t* lefts;            // [right nodes] the left nodes that each is joined to, as a set
};

// Odd, so that lanes that go down a column of the mesh hit different banks of a GPU's shared memory.
ISOLOAD_HD constexpr int64_t row_length(int64_t n) { return n | 1; }

constexpr int kTile = 16;         // nodes whose triangle is inverted
constexpr int kMostColumns = 64;  // nodes of a ColumnMesh
constexpr int kFlows = 2;         // currents that are followed at once, at most

// Of the 16 rows of a tile in a column: the packs that lanes load side by side lie in different banks.
template <class Real>
constexpr int column_length = kTile + Pack<Real>::kSize;

// What remains of a network once its hubs are gone: an edge k has `part` of its hub's conductance.
template <class Real>
struct Stars {
  NetworkSide left, right, kept, hubs;
  const Real *conductance, *part;        // [edges]
  const Real *kept_ground, *hub_ground;  // [nodes]
  bool left_kept;
};

template <class Real, class Team>
class Mesh {
 public:
  ISOLOAD_HD Mesh(Team& team, OrderedSum<Real, Team>& sum, int n, const MeshWorkspace<Real>& workspace)
      : team_(team), sum_(sum), n_(n), ws_(workspace) {}

  ISOLOAD_HD void prepare(const NetworkSide&, const NetworkSide&) {}

  // solve() comes behind a barrier.
  ISOLOAD_HD void factor(const Stars<Real>& stars) {
    team_.for_each(n_, [&](int a) { join(a, stars); });
    for (int k = 0; k < n_; ++k) eliminate(k);
  }

  // Currents [n] in, potentials out. A barrier last.
  ISOLOAD_HD void solve(Real* const (&kept)[kFlows], int flows) {
    for (int f = 0; f < flows; ++f) {
      const int last_tile = (n_ - 1) / kTile * kTile;
      for (int first = 0; first < n_; first += kTile) descend(first, kept[f]);
      for (int first = last_tile; first >= 0; first -= kTile) ascend(first, kept[f]);
    }
  }

 private:
  static constexpr int kPieces = 4;  // lanes per row of an elimination

  ISOLOAD_HD Real* row_of(int k) const { return ws_.rows + int64_t(k) * row_length(n_); }
  ISOLOAD_HD int end_of(int first) const { return first + kTile < n_ ? first + kTile : n_; }

  // Row a of the mesh that remains of the stars, right of the diagonal, and a's way to ground.
  ISOLOAD_HD void join(int a, const Stars<Real>& stars) {
    const NetworkSide &kept = stars.kept, &hubs = stars.hubs;
    Real* row = row_of(a);
    Real ground = stars.kept_ground[a];
    ISOLOAD_ROLLED
    for (int b = a + 1; b < n_; ++b) row[b] = 0;
    ISOLOAD_ROLLED
    for (int i = kept.first[a]; i < kept.first[a + 1]; ++i) {
      const int k = kept.edge(i), h = hubs.node[k];
      ground += stars.part[k] * stars.hub_ground[h];
      ISOLOAD_ROLLED
      for (int j = hubs.first[h]; j < hubs.first[h + 1]; ++j) {
        const int l = hubs.edge(j), b = kept.node[l];
        if (b > a) row[b] += stars.part[k] * stars.conductance[l];
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
      add(part, row, i + 1 + piece, n_, pieces, other);
      if (i < tile_end) add(part, row, tile + piece, k, pieces, other);
    });
  }

  // to[j] += part * row[j] for every stride-th j of [first, end).
  ISOLOAD_HD static void add(Real part, const Real* __restrict row, int first, int end, int stride,
                             Real* __restrict to) {
    ISOLOAD_BY_FOUR
    for (int j = first; j < end; j += stride) to[j] += part * row[j];
  }

  // From currents to what the tile's nodes have on their own, which flows on to the nodes after the tile.
  ISOLOAD_HD void descend(int first, Real* kept) {
    const int end = end_of(first);
    team_.for_each(end - first, [&](int m) {
      const Real* row = row_of(first + m);
      Real current = kept[first + m];
      ISOLOAD_ROLLED
      for (int j = first; j < first + m; ++j) current += row[j] * kept[j];
      ws_.own[first + m] = current * ws_.inverse[first + m];
    });
    team_.sync();
    if (end == n_) return;
    ISOLOAD_ROLLED
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
      ISOLOAD_ROLLED
      for (int k = first + m + 1; k < end; ++k) potential += row_of(k)[first + m] * ws_.own[k];
      kept[first + m] = potential;
    });
    team_.sync();
    if (first == 0) return;
    ISOLOAD_ROLLED
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
  const int n_;
  const MeshWorkspace<Real> ws_;
};

}  // namespace isoload
