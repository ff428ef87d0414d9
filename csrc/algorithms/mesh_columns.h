// ColumnMesh: a mesh (mesh.h) of at most kMost nodes, a column in the registers of one lane.
//
// The same sums in the same order, so the same bits. A tile of 16 rows is eliminated by one group of lanes: a
// step takes one barrier and a few loads of whole packs. What follows from the tile for later rows is left
// to the team, once per tile.
#pragma once

#include <cstdint>

#include "algorithms/mesh.h"
#include "algorithms/ordered_sum.h"
#include "host_device.h"
#include "packs.h"
#include "rank_set.h"

namespace isoload {

template <class Real, class Team, int kMost>
class ColumnMesh {
 public:
  static_assert(kMost % 32 == 0 && kMost <= kMostColumns && (kMost & (kMost - 1)) == 0,
                "whole warps, sets of one word");
  ISOLOAD_HD ColumnMesh(Team& team, OrderedSum<Real, Team>&, int n, const MeshWorkspace<Real>& workspace)
      : team_(team), n_(n), ws_(workspace) {}

  ISOLOAD_HD void prepare(const NetworkSide& left, const NetworkSide& right) {
    team_.for_each(right.size, [&](int e) {
      Set held;
      ISOLOAD_ROLLED
      for (int i = right.first[e]; i < right.first[e + 1]; ++i) held.insert(left.node[i]);
      ws_.lefts[e] = held.word[0];
    });
  }

  // A barrier last.
  ISOLOAD_HD void factor(const Stars<Real>& stars) {
    ISOLOAD_ROLLED
    for (int first = 0; first < n_; first += kTile) {
      for_pairs(first, [&](int a, int b) {
        if (first > 0 && a < b)
          follow(a, b, first - kTile);
        else if (first == 0)
          join(a, b, stars);
      });
      team_.sync();
      team_.alone([&](auto& group) { eliminate(group, first); });
    }
  }

  // Currents [n] in, potentials out; behind them, as in `owns`, lie zeros up to a whole tile. A barrier last.
  ISOLOAD_HD void solve(Real* const (&kept)[kFlows], int flows) {
    team_.for_each_group(flows, [&](int f, auto& group) {
      descend_and_ascend(group, f == 0 ? kept[0] : kept[1], ws_.owns + f * kMostColumns);
    });
    team_.sync();
  }

 private:
  using Set = RankSet<1>;

  // The 16 rows of the tile of node k, of column j: right of the diagonal what k conducts to j, left of it
  // the part of k's current that comes from j.
  ISOLOAD_HD Real* column_of(int k, int j) const {
    return ws_.columns + (int64_t(k / kTile) * n_ + j) * column_length<Real>;
  }
  ISOLOAD_HD Real& at(int k, int j) const { return column_of(k, j)[k % kTile]; }
  ISOLOAD_HD Real* triangle_of(int k) const { return ws_.triangles + int64_t(k) * column_length<Real>; }

  // f(a, b) for first <= a <= b < n. A row and its mirror image have n - first + 1 pairs together.
  template <class F>
  ISOLOAD_HD void for_pairs(int first, F&& f) {
    const int size = n_ - first, pairs = size + 1;
    team_.for_each((size + 1) / 2 * pairs, [&](int i) {
      const int row = i / pairs, place = i % pairs, mirror = size - 1 - row;
      const bool in_row = place < size - row;
      const int a = in_row ? row : mirror, b = in_row ? row + place : mirror + place - (size - row);
      if (in_row || mirror > row) f(first + a, first + b);
    });
  }

  ISOLOAD_HD void join(int a, int b, const Stars<Real>& stars) {
    if (a == b)
      start(a, stars);
    else
      at(a, b) = stars.left_kept ? between_lefts(a, b, stars) : between_rights(a, b, stars);
  }

  // a's way to ground, and no rows of its column from the diagonal on.
  ISOLOAD_HD void start(int a, const Stars<Real>& stars) {
    Real ground = stars.kept_ground[a];
    ISOLOAD_ROLLED
    for (int i = stars.kept.first[a]; i < stars.kept.first[a + 1]; ++i) {
      const int k = stars.kept.edge(i);
      ground += stars.part[k] * stars.hub_ground[stars.hubs.node[k]];
    }
    ws_.ground[a] = ground;
    ISOLOAD_ROLLED
    for (int i = a % kTile; i < kTile; ++i) column_of(a, a)[i] = 0;
  }

  // The edge from left node r to right node e, which are joined.
  ISOLOAD_HD int edge(const NetworkSide& right, int e, int r) const {
    const uint64_t before = ws_.lefts[e] & ((uint64_t(1) << r) - 1);
    return right.first[e] + count_ones(before);
  }

  // What hubs in between conduct, in the order of a's edges.
  ISOLOAD_HD Real between_lefts(int a, int b, const Stars<Real>& stars) const {
    const NetworkSide& left = stars.left;
    Real conducted = 0;
    ISOLOAD_ROLLED
    for (int i = left.first[a]; i < left.first[a + 1]; ++i) {
      const int k = left.edge(i), e = stars.right.node[k];
      if (ws_.lefts[e] >> b & 1) conducted += stars.part[k] * stars.conductance[edge(stars.right, e, b)];
    }
    return conducted;
  }
  ISOLOAD_HD Real between_rights(int a, int b, const Stars<Real>& stars) const {
    Real conducted = 0;
    ISOLOAD_ROLLED
    for (uint64_t both = ws_.lefts[a] & ws_.lefts[b]; both; both &= both - 1) {
      const int r = lowest_one(both);
      conducted += stars.part[edge(stars.right, a, r)] * stars.conductance[edge(stars.right, b, r)];
    }
    return conducted;
  }

  // The tile's nodes, as Mesh does it. A lane's registers move up by a row with each step, and the row that
  // all lanes read is the one behind the diagonal, so that every index is known when this is compiled.
  template <class Group>
  ISOLOAD_HD void eliminate(Group& group, int first) {
    constexpr int kOwn = kMost / Group::kLanes;  // columns of a lane; only the first ones are the tile's
    auto in_tile = [](int c) { return c * Group::kLanes < kTile; };
    auto later = [&](int c, int j, int k) { return !in_tile(c) || j > k; };
    const int width = n_ - first, rows = width < kTile ? width : kTile;
    Real column[kOwn][kTile], ground[kOwn];
    for (int c = 0; c < kOwn; ++c) {
      const int j = group.rank() + c * Group::kLanes, node = first + (j < width ? j : 0);
      load(column_of(first, node), column[c]);
      ground[c] = j < width ? ws_.ground[node] : 0;
    }
    ISOLOAD_ROLLED
    for (int k = 0; k < rows; ++k) {
      Real* const row = ws_.row + k % 2 * kMost;  // a lane that runs ahead writes the other one
      for (int c = 0; c < kOwn; ++c) {
        const int j = group.rank() + c * Group::kLanes;
        row[(j - k - 1) & (kMost - 1)] = later(c, j, k) && j < width ? column[c][0] : 0;
        if (in_tile(c) && j == k) ws_.ground[first + k] = ground[c];
      }
      group.sync();
      Real sums[OrderedSum<Real, Team>::kColumns], next[kTile];
      load(row, next);
      for (int t = 0; t < kTile; ++t) sums[t] = 0 + next[t];
      ISOLOAD_ROLLED
      for (int i = kTile; i < width - k - 1; i += kTile) {
        Real terms[kTile];
        load(row + i, terms);
        for (int t = 0; t < kTile; ++t) sums[t] += terms[t];
      }
      const Real to_ground = ws_.ground[first + k];
      const Real inverse = 1 / (to_ground + OrderedSum<Real, Team>::tree(sums));
      for (int i = 0; i < kTile; ++i) next[i] *= inverse;  // parts
      for (int c = 0; c < kOwn; ++c) {
        const int j = group.rank() + c * Group::kLanes;
        const bool is_k = in_tile(c) && j == k;
        const Real mine = column[c][0];
        if (j < width) column_of(first, first + j)[k] = is_k ? 0 : mine;
        if (in_tile(c) && j < kTile) triangle_of(first + k)[j] = j < k ? mine : 0;
        if (is_k) ws_.inverse[first + k] = inverse;
        if (later(c, j, k)) ground[c] += mine * inverse * to_ground;
        for (int i = 0; i + 1 < kTile; ++i)
          column[c][i] = (is_k ? 0 : column[c][i + 1]) + next[i] * (is_k ? 1 : mine);
        column[c][kTile - 1] = 0;
      }
    }
    for (int c = 0; c < kOwn; ++c) {
      const int j = group.rank() + c * Group::kLanes;
      if (j >= rows && j < width) ws_.ground[first + j] = ground[c];
    }
  }

  // What the tile's nodes, gone, leave between later ones.
  ISOLOAD_HD void follow(int a, int b, int first) {
    Real parts[kTile], inverse[kTile], row[kTile];
    load(column_of(first, a), parts);
    load(ws_.inverse + first, inverse);
    load(column_of(first, b), row);
    Real conducted = at(a, b);
    for (int k = 0; k < kTile; ++k) conducted += parts[k] * inverse[k] * row[k];
    at(a, b) = conducted;
  }

  // As Mesh does it. own [n]: what nodes have without those after them. Down the tiles from currents in
  // `kept` to `own`, and up from there to potentials in `kept`; what a tile's nodes have flows on to the
  // nodes ahead.
  template <class Group>
  ISOLOAD_HD void descend_and_ascend(Group& group, Real* kept, Real* own) {
    const int tiles = (n_ + kTile - 1) / kTile;
    ISOLOAD_ROLLED
    for (int turn = 0; turn < 2 * tiles; ++turn) {
      const bool down = turn < tiles;
      const int first = (down ? turn : 2 * tiles - 1 - turn) * kTile, rows = rows_of(first);
      Real *const from = down ? kept : own, *const to = down ? own : kept;
      group.for_each(rows, [&](int m) {
        const int a = first + m;
        const Real* values = down ? triangle_of(a) : column_of(first, a);
        const Real flow = add(from[a], values, from + first, down ? 0 : m + 1, down ? m : rows);
        to[a] = down ? flow * ws_.inverse[a] : flow;
      });
      group.sync();
      const int ahead = down ? first + rows : 0;
      group.for_each((down ? n_ : first) - ahead, [&](int i) {
        const int a = ahead + i;
        from[a] = down ? add(from[a], column_of(first, a), to + first, 0, kTile)
                       : add_mirrored(from[a], a, first, to + first);
      });
      group.sync();
    }
  }

  ISOLOAD_HD int rows_of(int first) const { return n_ - first < kTile ? n_ - first : kTile; }

  // flow + values[i] * of[i] for i in [begin, end), of a tile.
  ISOLOAD_HD static Real add(Real flow, const Real* values, const Real* of, int begin, int end) {
    Real value[kTile], factor[kTile];
    load(values, value);
    load(of, factor);
    for (int i = 0; i < kTile; ++i)
      if (i >= begin && i < end) flow += value[i] * factor[i];
    return flow;
  }

  // The same of a tile's column at node a of an earlier one: what the tile's nodes conduct to a, in parts.
  ISOLOAD_HD Real add_mirrored(Real flow, int a, int first, const Real* of) const {
    const Real inverse = ws_.inverse[a];
    Real factor[kTile];
    load(of, factor);
    for (int i = 0; i < kTile; ++i)
      if (first + i < n_) flow += at(a, first + i) * inverse * factor[i];
    return flow;
  }

  Team& team_;
  const int n_;
  const MeshWorkspace<Real> ws_;
};

// The mesh of a network with at most kMost nodes on one of its sides; 0: with any number.
template <class Real, class Team, int kMost>
struct MeshOf {
  using type = ColumnMesh<Real, Team, kMost>;
};
template <class Real, class Team>
struct MeshOf<Real, Team, 0> {
  using type = Mesh<Real, Team>;
};

}  // namespace isoload
