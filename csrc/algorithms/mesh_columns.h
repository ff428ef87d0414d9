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

  // factor() comes behind a barrier.
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
    for_pairs(0, [&](int a, int b) {
      if (a == b)
        start(a, stars);
      else
        at(a, b) = stars.left_kept ? between_lefts(a, b, stars) : between_rights(a, b, stars);
    });
    team_.sync();
    for (int first = 0; first < n_; first += kTile) {
      team_.alone([&](auto& group) { eliminate(group, first); });
      if (first + kTile >= n_) break;
      for_pairs(first + kTile, [&](int a, int b) {
        if (a < b) follow(a, b, first);
      });
      team_.sync();
    }
  }

  // Currents [n] in, potentials out. A barrier last.
  ISOLOAD_HD void solve(Real* const (&kept)[kFlows], int flows) {
    team_.for_each_group(flows, [&](int f, auto& group) {
      descend_and_ascend(group, f == 0 ? kept[0] : kept[1], ws_.shared + f * 2 * kTile);
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
    constexpr int kOwn = kMost / Group::kLanes;  // columns of a lane
    const int width = n_ - first, rows = width < kTile ? width : kTile;
    Real column[kOwn][kTile], ground[kOwn];
    for (int c = 0; c < kOwn; ++c) {
      const int j = group.rank() + c * Group::kLanes;
      for (int i = 0; i < kTile; ++i) column[c][i] = 0;
      if (j < width) load(column_of(first, first + j), column[c]);
      ground[c] = j < width ? ws_.ground[first + j] : 0;
    }
    ISOLOAD_ROLLED
    for (int k = 0; k < rows; ++k) {
      Real* const row = ws_.row + k % 2 * kMost;  // a lane that runs ahead writes the other one
      for (int c = 0; c < kOwn; ++c) {
        const int j = group.rank() + c * Group::kLanes;
        row[(j - k - 1) & (kMost - 1)] = j > k ? column[c][0] : 0;
        if (j == k) ws_.ground[first + k] = ground[c];
      }
      group.sync();
      Real sums[OrderedSum<Real, Team>::kColumns] = {}, next[kTile] = {};
      ISOLOAD_ROLLED
      for (int i = 0; i < width - k - 1; i += kTile) {
        Real terms[kTile];
        load(row + i, terms);
        for (int t = 0; t < kTile; ++t) {
          sums[t] += terms[t];
          next[t] = i == 0 ? terms[t] : next[t];
        }
      }
      const Real to_ground = ws_.ground[first + k];
      const Real inverse = 1 / (to_ground + OrderedSum<Real, Team>::tree(sums));
      for (int i = 0; i < kTile; ++i) next[i] *= inverse;  // parts
      for (int c = 0; c < kOwn; ++c) {
        const int j = group.rank() + c * Group::kLanes;
        const Real mine = column[c][0];
        if (j < width) column_of(first, first + j)[k] = j == k ? 0 : mine;
        if (j < kTile) triangle_of(first + k)[j] = j < k ? mine : 0;
        if (j == k) ws_.inverse[first + k] = inverse;
        if (j > k) ground[c] += mine * inverse * to_ground;
        for (int i = 0; i + 1 < kTile; ++i)
          column[c][i] = (j == k ? 0 : column[c][i + 1]) + next[i] * (j == k ? 1 : mine);
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

  // As Mesh does it; a lane keeps its nodes. shared [2, kTile]: what a tile's nodes have, before and after.
  template <class Group>
  ISOLOAD_HD void descend_and_ascend(Group& group, Real* kept, Real* shared) {
    constexpr int kOwn = kMost / Group::kLanes;
    Real* const own = shared + kTile;
    Real flow[kOwn];
    for (int c = 0; c < kOwn; ++c) {
      const int a = group.rank() + c * Group::kLanes;
      flow[c] = a < n_ ? kept[a] : 0;
    }
    int first = 0;
    ISOLOAD_ROLLED
    for (;; first += kTile) {
      const int end = first + kTile;
      show(group, flow, first, shared);
      for (int c = 0; c < kOwn; ++c) {
        const int a = group.rank() + c * Group::kLanes;
        if (a < first || a >= end || a >= n_) continue;
        Real before[kTile], currents[kTile];
        load(triangle_of(a), before);
        load(shared, currents);
        for (int j = 0; j < kTile; ++j)
          if (j < a - first) flow[c] += before[j] * currents[j];
        flow[c] *= ws_.inverse[a];
      }
      show(group, flow, first, own);
      if (end >= n_) break;
      for (int c = 0; c < kOwn; ++c) {
        const int a = group.rank() + c * Group::kLanes;
        if (a < end || a >= n_) continue;
        Real row[kTile], had[kTile];
        load(column_of(first, a), row);
        load(own, had);
        for (int k = 0; k < kTile; ++k) flow[c] += row[k] * had[k];
      }
    }
    ISOLOAD_ROLLED
    for (;;) {
      const int end = first + kTile < n_ ? first + kTile : n_;
      for (int c = 0; c < kOwn; ++c) {
        const int a = group.rank() + c * Group::kLanes;
        if (a < first || a >= end) continue;
        Real after[kTile], had[kTile];
        load(column_of(first, a), after);
        load(own, had);
        for (int k = 0; k < kTile; ++k)
          if (k > a - first && k < end - first) flow[c] += after[k] * had[k];
        kept[a] = flow[c];
      }
      if (first == 0) break;
      show(group, flow, first, shared);
      for (int c = 0; c < kOwn; ++c) {
        const int a = group.rank() + c * Group::kLanes;
        if (a >= first) continue;
        const Real inverse = ws_.inverse[a];
        Real potentials[kTile];
        load(shared, potentials);
        for (int k = 0; k < kTile; ++k)
          if (first + k < end) flow[c] += at(a, first + k) * inverse * potentials[k];
      }
      first -= kTile;
      show(group, flow, first, own);
    }
  }

  // To all lanes: what the tile's nodes have. A barrier last.
  template <class Group, int kOwn>
  ISOLOAD_HD static void show(Group& group, const Real (&flow)[kOwn], int first, Real* to) {
    for (int c = 0; c < kOwn; ++c) {
      const int m = group.rank() + c * Group::kLanes - first;
      if (m >= 0 && m < kTile) to[m] = flow[c];
    }
    group.sync();
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
