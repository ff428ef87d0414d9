// Cholesky: Newton's equations of plan_lp by a dense factorisation of the normal equations, for a Team of
// lanes.
//
// The equations join two sides, ranks and experts. The nodes of the larger side are coupled only to the other
// side, so they are eliminated first. The matrix that remains is dense in the smaller side and has positive
// pivots and non-positive other entries. The code stores the negated entries and computes every pivot from
// its row's excess and entries, so that nothing is subtracted: factors have small relative errors even where
// x / z spans more digits than float32 has (the GTH algorithm for M-matrices).
//
// Float addition is not associative, so the order of sums is part of the result: term i goes to column i % 8,
// every column adds its terms by ascending i, and the columns are added as a tree.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "host_device.h"

namespace isoload {

constexpr int kSumColumns = 8;  // of a sum
constexpr int kSums = 4;        // sums at once
constexpr int kFlows = 2;       // right-hand sides at once
constexpr int kTile = 16;       // rows whose triangle is inverted, so that a solve takes one step per tile

template <class Real>
ISOLOAD_HD Real tree(const Real* column) {
  return ((column[0] + column[4]) + (column[2] + column[6])) +
         ((column[1] + column[5]) + (column[3] + column[7]));
}

// How many lanes add up one sum: a single lane adds all columns at once, as vectors.
template <class Team>
ISOLOAD_HD int lanes_per_sum(const Team& team) {
  return team.size() == 1 ? 1 : kSumColumns;
}

// Writes the columns of term(0) .. term(n - 1) of this lane out of lanes_per_sum to column [kSumColumns].
template <class Real, class F>
ISOLOAD_HD void add_columns(int n, F&& term, Real* column, int lane, int lanes) {
  if (lanes > 1) {
    Real sum = 0;
    ISOLOAD_ROLLED
    for (int j = lane; j < n; j += kSumColumns) sum += term(j);
    column[lane] = sum;
    return;
  }
  Real sum[kSumColumns] = {};
  int j = 0;
  for (; j + kSumColumns <= n; j += kSumColumns)
    for (int c = 0; c < kSumColumns; ++c) sum[c] += term(j + c);
  for (int c = 0; j + c < n; ++c) sum[c] += term(j + c);
  for (int c = 0; c < kSumColumns; ++c) column[c] = sum[c];
}

// One side's nodes: node i's edges are edge(first[i]) .. edge(end[i] - 1), and node[k] is the end of edge k.
struct Side {
  int size;
  const int32_t *first, *end, *list, *node;  // a null list: edges are numbered node by node

  ISOLOAD_HD int edge(int i) const { return list == nullptr ? i : list[i]; }

  // sum + term(k) over the edges k of a node, in their order.
  template <class Real, class F>
  ISOLOAD_HD Real total(int i, Real sum, F&& term) const {
    ISOLOAD_ROLLED
    for (int j = first[i]; j < end[i]; ++j) sum += term(edge(j));
    return sum;
  }
};

// The largest of non-negative values, one per lane; NaN counts as the largest. Their bits as integers have
// the same order. A barrier.
template <class Real, class Team>
ISOLOAD_HD Real largest(Team& team, Real value) {
  using Bits = std::conditional_t<sizeof(Real) == 4, int32_t, int64_t>;
  constexpr Bits kNoSign = ~uint64_t(0) >> (65 - 8 * sizeof(Bits));
  Bits bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits &= kNoSign;
  if constexpr (sizeof(Real) == 4)
    bits = team.max32(bits);
  else
    bits = team.max(bits);
  std::memcpy(&value, &bits, sizeof bits);
  return value;
}

// Up to kSums sums between two barriers. scratch: [2, kSums, kSumColumns].
template <class Real, class Team>
class Sums {
 public:
  ISOLOAD_HD Sums(Team& team, Real* scratch) : team_(team), scratch_(scratch) {}

  // Before the first add() behind a barrier: a lane that runs ahead writes the other half.
  ISOLOAD_HD void start() { odd_ = !odd_; }

  // Adds term(0) .. term(n - 1) as sum i. The terms are from before the last barrier.
  template <class F>
  ISOLOAD_HD void add(int i, int n, F&& term) {
    const int lanes = lanes_per_sum(team_), first = i * lanes;  // every sum by other lanes
    Real* const column = half() + i * kSumColumns;
    team_.for_each(first + lanes, [&](int m) {
      if (m >= first) add_columns(n, term, column, m - first, lanes);
    });
  }

  // Sum i, behind a barrier.
  ISOLOAD_HD Real take(int i) const { return tree(half() + i * kSumColumns); }

 private:
  ISOLOAD_HD Real* half() const { return scratch_ + (odd_ ? kSums * kSumColumns : 0); }

  Team& team_;
  Real* const scratch_;
  bool odd_ = false;
};

template <class Real>
struct CholeskyWorkspace {
  Real* rows;                       // [n, row_length(n)] of the kept side's n nodes
  Real *excess, *inverse, *middle;  // [n]: a row's sum; 1 / pivot; [kFlows, n] between the triangles
  Real *diagonal, *share;           // [larger side] of an eliminated node; [edges] of its diagonal
  Real* columns;                    // [2, kSumColumns] of a pivot
};

// An odd length, so that lanes that read down a column use different banks of a GPU's shared memory.
ISOLOAD_HD constexpr int64_t row_length(int64_t n) { return n | 1; }

template <class Real, class Team>
class Cholesky {
 public:
  ISOLOAD_HD Cholesky(Team& team, Side ranks, Side experts, const CholeskyWorkspace<Real>& workspace)
      : team_(team),
        keeps_ranks_(ranks.size <= experts.size),
        kept_(keeps_ranks_ ? ranks : experts),
        gone_(keeps_ranks_ ? experts : ranks),
        n_(kept_.size),
        ws_(workspace) {}

  // weight [edges]: a rank's diagonal entry has the weights of its slack and its parts, an expert's those of
  // its parts. All from before the last barrier. A barrier last.
  ISOLOAD_HD void factor(const Real* weight) {
    weight_ = weight;
    team_.for_each(gone_.size, [&](int h) {
      const Real own = keeps_ranks_ ? Real(0) : weight_[h];
      const Real diagonal = gone_.total(h, own, [&](int k) { return weight[k]; });
      ws_.diagonal[h] = diagonal;
      ISOLOAD_ROLLED
      for (int i = gone_.first[h]; i < gone_.end[h]; ++i)
        ws_.share[gone_.edge(i)] = weight[gone_.edge(i)] / diagonal;
    });
    team_.sync();
    team_.for_each(n_, [&](int a) { eliminate_neighbours(a); });
    team_.sync();
    const int lanes = lanes_per_sum(team_);
    if (n_ > 0) team_.for_each(lanes, [&](int lane) { add_row(0, lane, lanes); });
    team_.sync();
    ISOLOAD_ROLLED
    for (int k = 0; k < n_; ++k) eliminate(k);
  }

  // Right-hand sides [flows, nodes] become solutions, in place; from before the last barrier. A barrier last.
  ISOLOAD_HD void solve(Real* ranks, Real* experts, int flows) {
    Real *const kept = keeps_ranks_ ? ranks : experts, *const gone = keeps_ranks_ ? experts : ranks;
    for_flows(flows, 0, n_, [&](int f, int a) {
      const Real* const other = gone + f * gone_.size;
      Real& mine = kept[f * n_ + a];
      mine = kept_.total(a, mine, [&](int k) { return ws_.share[k] * other[gone_.node[k]]; });
    });
    team_.sync();
    const int last = n_ > 0 ? (n_ - 1) / kTile * kTile : -1;
    ISOLOAD_ROLLED
    for (int first = 0; first < n_; first += kTile) descend(first, kept, flows);
    ISOLOAD_ROLLED
    for (int first = last; first >= 0; first -= kTile) ascend(first, kept, flows);
    for_flows(flows, 0, gone_.size, [&](int f, int h) {
      const Real* const other = kept + f * n_;
      Real& mine = gone[f * gone_.size + h];
      mine = gone_.total(h, mine, [&](int k) { return weight_[k] * other[kept_.node[k]]; }) / ws_.diagonal[h];
    });
    team_.sync();
  }

 private:
  ISOLOAD_HD Real* row_of(int k) const { return ws_.rows + int64_t(k) * row_length(n_); }
  ISOLOAD_HD int end_of(int tile) const { return tile + kTile < n_ ? tile + kTile : n_; }

  // f(flow, i) for i in [first, end) of every flow.
  template <class F>
  ISOLOAD_HD void for_flows(int flows, int first, int end, F&& f) {
    const int n = end - first;
    if (flows == 1) return team_.for_each(n, [&](int i) { f(0, first + i); });
    team_.for_each(2 * n, [&](int i) { i < n ? f(0, first + i) : f(1, first + i - n); });
  }

  // Row a right of the diagonal once the eliminated nodes are gone, and the row's excess.
  ISOLOAD_HD void eliminate_neighbours(int a) {
    Real* row = row_of(a);
    Real excess = keeps_ranks_ ? weight_[a] : Real(0);
    ISOLOAD_ROLLED
    for (int b = a + 1; b < n_; ++b) row[b] = 0;
    ISOLOAD_ROLLED
    for (int i = kept_.first[a]; i < kept_.end[a]; ++i) {
      const int k = kept_.edge(i), h = gone_.node[k];
      const Real share = ws_.share[k];
      if (!keeps_ranks_) excess += share * weight_[h];
      ISOLOAD_ROLLED
      for (int j = gone_.first[h]; j < gone_.end[h]; ++j) {
        const int l = gone_.edge(j), b = kept_.node[l];
        if (b > a) row[b] += share * weight_[l];
      }
    }
    ws_.excess[a] = excess;
  }

  // The pivot of row k is its excess and its entries right of the diagonal, which `lanes` lanes add up.
  ISOLOAD_HD void add_row(int k, int lane, int lanes) {
    const Real* row = row_of(k) + k + 1;
    add_columns(n_ - k - 1, [&](int j) { return row[j]; }, ws_.columns + k % 2 * kSumColumns, lane, lanes);
  }

  // Row k keeps its entries right of the diagonal. In the rows below, column k takes L; within a tile L's
  // inverse. A barrier last, the only one: what step k reads, no lane writes before it.
  ISOLOAD_HD void eliminate(int k) {
    const Real* row = row_of(k);
    const int below = n_ - k - 1, tile = k / kTile * kTile, tile_end = end_of(tile);
    const Real excess = ws_.excess[k], inverse = 1 / (excess + tree(ws_.columns + k % 2 * kSumColumns));
    if (team_.rank() == 0) ws_.inverse[k] = inverse;
    const int lanes = lanes_per_sum(team_);  // per row
    team_.for_each(below * lanes, [&](int m) {
      const int i = k + 1 + m / lanes, lane = m % lanes;
      Real* other = row_of(i);
      const Real part = row[i] * inverse;
      if (lane == 0) ws_.excess[i] += part * excess, other[k] = part;
      add(part, row, i + 1 + lane, n_, lanes, other);
      if (i < tile_end) add(part, row, tile + lane, k, lanes, other);
      if (i == k + 1) add_row(i, lane, lanes);
    });
    team_.sync();
  }

  // to[j] += part * row[j] for every stride-th j of [first, end).
  ISOLOAD_HD static void add(Real part, const Real* __restrict row, int first, int end, int stride,
                             Real* __restrict to) {
    ISOLOAD_BY_FOUR
    for (int j = first; j < end; j += stride) to[j] += part * row[j];
  }

  // A tile's part of the forward substitution, with the division by its pivots.
  ISOLOAD_HD void descend(int first, Real* kept, int flows) {
    const int end = end_of(first);
    for_flows(flows, first, end, [&](int f, int i) {
      const Real *row = row_of(i), *right = kept + f * n_;
      Real sum = right[i];
      ISOLOAD_ROLLED
      for (int j = first; j < i; ++j) sum += row[j] * right[j];
      ws_.middle[f * n_ + i] = sum * ws_.inverse[i];
    });
    team_.sync();
    if (end == n_) return;
    ISOLOAD_ROLLED
    for (int k = first; k < end; ++k) {  // a lane keeps its rows, so no barrier
      const Real* row = row_of(k);
      for_flows(flows, end, n_, [&](int f, int i) { kept[f * n_ + i] += row[i] * ws_.middle[f * n_ + k]; });
    }
    team_.sync();
  }

  // A tile's part of the backward substitution.
  ISOLOAD_HD void ascend(int first, Real* kept, int flows) {
    const int end = end_of(first);
    for_flows(flows, first, end, [&](int f, int i) {
      const Real* middle = ws_.middle + f * n_;
      Real sum = middle[i];
      ISOLOAD_ROLLED
      for (int k = i + 1; k < end; ++k) sum += row_of(k)[i] * middle[k];
      kept[f * n_ + i] = sum;
    });
    team_.sync();
    if (first == 0) return;
    ISOLOAD_ROLLED
    for (int k = first; k < end; ++k) {
      const Real* row = row_of(k);
      for_flows(flows, 0, first, [&](int f, int i) { ws_.middle[f * n_ + i] += row[i] * kept[f * n_ + k]; });
    }
    team_.sync();
  }

  Team& team_;
  const bool keeps_ranks_;
  const Side kept_, gone_;
  const int n_;
  const CholeskyWorkspace<Real> ws_;
  const Real* weight_ = nullptr;
};

}  // namespace isoload
