// The linear program of plan_lp, listed from the replica tables: what is left to decide and what is not.
//
// A part is what one rank takes of one expert. Parts exist only for replicated experts with load, on ranks
// with speed. Ranks without speed take nothing and are left out, so are experts without a choice of rank:
// their copies are a burden of their rank, like the base load.
//
// An edge is a rank's slack or a part. The first are slacks: edge r joins rank r to the ground, an expert
// more whose potential is 0. Parts are numbered expert by expert, but sums of all take them by slot.
#pragma once

#include <climits>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <type_traits>

#include "algorithms/network.h"
#include "algorithms/ordered_sum.h"
#include "algorithms/replica_tables.h"
#include "host_device.h"

namespace isoload {

template <class Real>
struct LpProblem : SplitProblem {
  const Real* speeds;  // [R] >= 0, or null: all 1
  const Real* base;    // [R] >= 0 copies that a rank carries besides, or null
  Real tolerance;      // converged when primal - dual <= tolerance * primal
  int iterations;      // most
};

enum class LpStatus : int32_t { converged = 0, open = 1, broke_down = 2 };

template <class Real>
struct LpResult {
  Real* split;          // [P] copies per slot
  Real *primal, *dual;  // [1] largest rank cost of the split; proved lower bound
  int32_t *iterations, *status;
};

// Caller's memory; every array is written before it is read.
template <class Real>
struct LpWorkspace {
  // [edges] a part's copies x and reduced cost z, a rank's slack s and price y; their steps, products, x / z
  Real *x, *z, *dx, *dz, *product, *conductance;
  // [ranks] speed, burden, cost of the split, what rank rows lack
  Real *speed, *burden, *cost, *rank_excess;
  // [experts] load, load / sum of its parts, its term of the bound, what expert rows lack, zeros
  Real *load, *scale, *value, *expert_excess, *expert_ground;
  // [ranks], [experts + 1] potentials: of the current solve, and of currents = speeds. Up to `columns` all
  // that no node has is 0: the ground's, and what lies behind the nodes where a mesh loads whole tiles
  Real *rank_u, *rank_g, *expert_u, *expert_g;
  Real* columns;  // of the sums
  NetworkWorkspace<Real> network;
  int32_t* total;                                // [E] copies
  int32_t* numbers;                              // [R + P + 2 E] of LpParts
  int32_t *rank_first, *expert_first;            // [ranks + 1] in rank_parts, [experts + 1] edges
  int32_t* rank_parts;                           // [parts] by slot, so by rank
  int32_t *edge_rank, *edge_expert, *edge_slot;  // [edges]; slots of parts alone
  int32_t* edge_place;                           // [edges] in `product`: slacks, then parts by slot

  ISOLOAD_HD LpWorkspace(void* memory, int64_t R, int64_t E, int64_t P) {
    char* next = static_cast<char*>(memory);
    lay_out(R, E, P, [&](auto** array, int64_t length) {
      using T = std::remove_reference_t<decltype(**array)>;
      *array = reinterpret_cast<T*>(next);
      next += padded(length * sizeof(**array));
    });
  }
  ISOLOAD_HD static int64_t size(int64_t R, int64_t E, int64_t P) {
    int64_t bytes = 0;
    LpWorkspace().lay_out(R, E, P,
                          [&](auto** array, int64_t length) { bytes += padded(length * sizeof(**array)); });
    return bytes;
  }

 private:
  LpWorkspace() = default;

  // Each at a multiple of 16 bytes from the first, for packs.
  ISOLOAD_HD static int64_t padded(int64_t bytes) { return (bytes + 15) & ~int64_t(15); }

  // take(&array, length) of all.
  template <class Take>
  ISOLOAD_HD void lay_out(int64_t R, int64_t E, int64_t P, Take&& take) {
    const int64_t kept = R < E ? R : E, all = R > E ? R : E;
    for (Real** array : {&x, &z, &dx, &dz, &product, &conductance, &network.part}) take(array, R + P);
    for (Real** array : {&speed, &burden, &cost, &rank_excess}) take(array, R);
    for (Real** array : {&load, &scale, &value, &expert_excess, &expert_ground}) take(array, E);
    for (Real** array : {&rank_u, &rank_g}) take(array, R + kTile);
    for (Real** array : {&expert_u, &expert_g}) take(array, E + kTile);
    take(&network.mesh.owns, kFlows * kMostColumns);
    take(&columns, OrderedSum<Real, int>::kScratch);
    take(&network.star, all);
    lay_out_mesh(kept, E, take);
    take(&total, E);
    take(&numbers, R + P + 2 * E);
    take(&rank_first, R + 1);
    take(&expert_first, E + 1);
    take(&rank_parts, P);
    for (int32_t** array : {&edge_rank, &edge_expert, &edge_slot, &edge_place}) take(array, R + P);
  }
  template <class Take>
  ISOLOAD_HD void lay_out_mesh(int64_t n, int64_t E, Take&& take) {
    MeshWorkspace<Real>& mesh = network.mesh;
    for (Real** array : {&mesh.ground, &mesh.inverse, &mesh.own}) take(array, n);
    take(&mesh.rows, n * row_length(n));
    if (n > kMostColumns) return;
    take(&mesh.columns, (n + kTile - 1) / kTile * n * column_length<Real>);
    take(&mesh.triangles, n * column_length<Real>);
    take(&mesh.row, 2 * kMostColumns);
    take(&mesh.lefts, E);
  }
};

template <class Real, class Team>
class LpParts {
 public:
  ISOLOAD_HD LpParts(Team& team, const LpProblem<Real>& problem, const LpWorkspace<Real>& workspace,
                     Real* split)
      : team_(team),
        in_(problem),
        t_(problem.tables),
        ws_(workspace),
        split_(split),
        P_(problem.R * problem.S),
        rank_at_(workspace.numbers),
        place_(rank_at_ + problem.R),
        first_(place_ + P_),
        expert_at_(first_ + problem.E) {}

  // Lists ranks, experts and edges, and writes the split of all other slots. False if the problem cannot be
  // solved: negative loads, 2^31 copies or more, or copies that no rank with speed can take. A barrier last.
  ISOLOAD_HD bool list() {
    if (!add_up()) return false;
    bool taken = true;
    mark(taken);
    team_.sync();
    const int all = team_.scan(ws_.numbers, in_.R + P_ + 2 * in_.E);
    num_ranks_ = place_[0];
    num_edges_ = first_[0];
    num_experts_ = all - num_edges_ - num_parts();
    if (team_.rank() == 0) {
      ws_.rank_first[num_ranks_] = num_parts();
      ws_.expert_first[num_experts_] = num_edges_;
    }
    const int potentials = static_cast<int>(ws_.columns - ws_.rank_u);
    team_.for_each(potentials, [&](int i) { ws_.rank_u[i] = 0; });
    Real heaviest = 0;
    team_.for_each(in_.R, [&](int r) { list_rank(r, heaviest, taken); });
    team_.for_each(in_.E, [&](int e) { list_expert(e); });
    constexpr Real kNever = std::numeric_limits<Real>::quiet_NaN();
    heaviest_burden_ = largest(team_, taken ? heaviest : kNever);
    return heaviest_burden_ == heaviest_burden_;
  }

  ISOLOAD_HD NetworkSide ranks() const { return {num_ranks_, ws_.rank_first, ws_.rank_parts, ws_.edge_rank}; }
  ISOLOAD_HD NetworkSide experts() const {
    return {num_experts_, ws_.expert_first, nullptr, ws_.edge_expert};
  }
  ISOLOAD_HD int num_edges() const { return num_edges_; }
  // A bound on the largest cost without prices: what cannot move.
  ISOLOAD_HD Real heaviest_burden() const { return heaviest_burden_; }

 private:
  ISOLOAD_HD int num_parts() const { return num_edges_ - num_ranks_; }

  // Every expert's copies; 1 for each rank that is listed. A barrier last.
  ISOLOAD_HD bool add_up() {
    constexpr int64_t kTooMany = int64_t(INT32_MAX) + 1;
    int64_t copies = 0, sign = 0;
    team_.for_each(in_.E, [&](int e) {
      int64_t total = 0;
      ISOLOAD_ROLLED
      for (int s = 0; s < in_.num_sources; ++s) {
        const int32_t load = in_.loads[int64_t(s) * in_.E + e];
        sign |= load;
        total += load;
      }
      copies += total;
      ws_.total[e] = static_cast<int32_t>(total);
    });
    team_.for_each(in_.R, [&](int r) { rank_at_[r] = in_.speeds == nullptr || in_.speeds[r] > 0; });
    team_.for_each(P_, [&](int p) { place_[p] = 0; });
    return team_.sum(sign < 0 ? kTooMany : copies) < kTooMany;
  }

  // 1 for each slot of a part and each expert that is listed; the parts of each expert. Not taken, if none of
  // its ranks has speed, or it has no rank.
  ISOLOAD_HD void mark(bool& taken) {
    team_.for_each(in_.E, [&](int e) {
      const int first = t_.offsets[e], copies = t_.copies(e), total = ws_.total[e];
      int parts = 0;
      ISOLOAD_ROLLED
      for (int j = first; total > 0 && copies > 1 && j < first + copies; ++j) {
        if (rank_at_[t_.ranks[j]] == 0) continue;
        place_[t_.slots[j]] = 1;
        ++parts;
      }
      first_[e] = parts;
      expert_at_[e] = parts > 0;
      taken &= total == 0 || copies == 1 || parts > 0;
    });
    team_.for_each(P_, [&](int p) {
      ws_.x[p] = split_[p] = t_.solo[p] >= 0 ? static_cast<Real>(ws_.total[t_.solo[p]]) : Real(0);
    });
  }

  // What a rank carries already. Not taken, if it is without speed and carries something.
  ISOLOAD_HD void list_rank(int r, Real& heaviest, bool& taken) {
    const int a = rank_at_[r], S = in_.S;
    Real burden = in_.base ? in_.base[r] : Real(0);
    ISOLOAD_ROLLED
    for (int p = r * S; p < r * S + S; ++p) burden += ws_.x[p];
    if (rank_at_[r + 1] == a) {
      taken &= !(burden > 0);
      return;
    }
    const Real speed = in_.speeds ? in_.speeds[r] : Real(1), cost = burden / speed;
    heaviest = cost > heaviest ? cost : heaviest;
    ws_.burden[a] = burden;
    ws_.speed[a] = speed;
    ws_.rank_first[a] = place_[r * S] - num_ranks_;
    ws_.edge_rank[a] = ws_.edge_place[a] = a;
    ws_.edge_expert[a] = num_experts_;
  }

  ISOLOAD_HD void list_expert(int e) {
    const int first = first_[e] - num_parts(), end = first_[e + 1] - num_parts();
    if (first == end) return;
    const int a = expert_at_[e] - num_edges_ - num_parts();
    ws_.expert_first[a] = first;
    ws_.load[a] = static_cast<Real>(ws_.total[e]);
    ws_.expert_ground[a] = 0;
    int j = t_.offsets[e];
    ISOLOAD_ROLLED
    for (int k = first; k < end; ++j) {
      const int r = t_.ranks[j], p = t_.slots[j];
      if (rank_at_[r + 1] == rank_at_[r]) continue;
      ws_.rank_parts[place_[p] - num_ranks_] = k;
      ws_.edge_rank[k] = rank_at_[r];
      ws_.edge_expert[k] = a;
      ws_.edge_slot[k] = p;
      ws_.edge_place[k] = place_[p];
      ++k;
    }
  }

  Team& team_;
  const LpProblem<Real>& in_;
  const ReplicaTables t_;
  const LpWorkspace<Real>& ws_;
  Real* const split_;
  const int P_;
  // [R], [P], [E], [E] of ws_.numbers: ones and counts, then what stands before. Each goes on from the one
  // before, so place_ counts ranks and parts by slot, first_ those and parts by expert, expert_at_ all; and
  // what is not listed has the number of what comes next.
  int32_t *const rank_at_, *const place_, *const first_, *const expert_at_;
  int num_ranks_ = 0, num_experts_ = 0, num_edges_ = 0;
  Real heaviest_burden_ = 0;
};

}  // namespace isoload
