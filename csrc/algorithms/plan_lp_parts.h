// The linear program of plan_lp, listed from the replica tables: what is left to decide and what is not.
//
// A part is what one rank takes of one expert. Parts exist only for replicated experts with load, on ranks
// with speed; they are numbered expert by expert, and sums of all take them by slot. Ranks without speed take
// nothing and are left out, so are experts without a choice of rank: their copies are a burden of their rank,
// like the base load.
#pragma once

#include <climits>
#include <cstdint>

#include "algorithms/network.h"
#include "algorithms/ordered_sum.h"
#include "algorithms/replica_tables.h"
#include "host_device.h"

namespace isoload {

template <class Real>
struct LpProblem {
  int R, E, S;           // ranks, logical experts, slots per rank
  ReplicaTables tables;  // of this layer
  const int32_t* loads;  // [num_sources, E] copies; summed over sources here
  int num_sources;       //
  const Real* speeds;    // [R] >= 0, or null: all 1
  const Real* base;      // [R] >= 0 copies that a rank carries besides, or null
  Real tolerance;        // converged when primal - dual <= tolerance * primal
  int iterations;        // most
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
  // [parts] copies x, reduced cost z, their steps, a product of both, x / z
  Real *x, *z, *dx, *dz, *product, *conductance;
  // [ranks] speed, burden, cost of the split; slack s, price y, their steps, a product, s / y; what rank rows
  // lack
  Real *speed, *burden, *cost, *s, *y, *ds, *dy, *rank_product, *rank_ground, *rank_excess;
  // [experts] load, load / sum of its parts, its term of the bound, what expert rows lack, zeros
  Real *load, *scale, *value, *expert_excess, *expert_ground;
  // potentials of ranks and experts: of the current solve, and of currents = speeds
  Real *rank_u, *rank_g, *expert_u, *expert_g;
  Real* columns;  // of the sums
  NetworkWorkspace<Real> network;
  int32_t* total;                                // [E] copies
  int32_t *rank_at, *expert_at, *part_at;        // [R], [E], [P] number of the listed rank, expert, part
  int32_t *rank_first, *expert_first;            // [ranks + 1], [experts + 1]
  int32_t* rank_parts;                           // [parts] by slot, so by rank
  int32_t *part_rank, *part_expert, *part_slot;  // [parts]
  int32_t* part_place;                           // [parts] in rank_parts
  int64_t bytes = 0;

  ISOLOAD_HD LpWorkspace(void* memory, int64_t R, int64_t E, int64_t P)
      : memory_(static_cast<char*>(memory)) {
    const int64_t kept = R < E ? R : E, all = R > E ? R : E;
    for (Real** array : {&x, &z, &dx, &dz, &product, &conductance, &network.part}) take(array, P);
    for (Real** array : {&speed, &burden, &cost, &s, &y, &ds, &dy, &rank_product, &rank_ground, &rank_excess,
                         &rank_u, &rank_g})
      take(array, R);
    for (Real** array : {&load, &scale, &value, &expert_excess, &expert_ground, &expert_u, &expert_g})
      take(array, E);
    take(&columns, OrderedSum<Real, int>::kScratch);
    take(&network.star, all);
    take_mesh(kept, E);
    take(&total, E);
    take(&rank_at, R);
    take(&expert_at, E);
    take(&rank_first, R + 1);
    take(&expert_first, E + 1);
    for (int32_t** array : {&part_at, &rank_parts, &part_rank, &part_expert, &part_slot, &part_place})
      take(array, P);
  }
  ISOLOAD_HD static int64_t size(int64_t R, int64_t E, int64_t P) {
    return LpWorkspace(nullptr, R, E, P).bytes;
  }

 private:
  ISOLOAD_HD void take_mesh(int64_t n, int64_t E) {
    MeshWorkspace<Real>& mesh = network.mesh;
    for (Real** array : {&mesh.ground, &mesh.inverse, &mesh.own}) take(array, n);
    take(&mesh.rows, n * row_length(n));
    if (n > kMostColumns) return;
    take(&mesh.columns, (n + kTile - 1) / kTile * n * column_length<Real>);
    take(&mesh.triangles, n * column_length<Real>);
    take(&mesh.row, 2 * kMostColumns);
    take(&mesh.shared, 2 * kFlows * kTile);
    take(&mesh.lefts, E);
  }

  // At a multiple of 16 bytes from the first, for packs.
  template <class T>
  ISOLOAD_HD void take(T** array, int64_t length) {
    *array = memory_ ? reinterpret_cast<T*>(memory_ + bytes) : nullptr;
    bytes += (length * int64_t(sizeof(T)) + 15) / 16 * 16;
  }
  char* memory_;
};

template <class Real, class Team>
class LpParts {
 public:
  ISOLOAD_HD LpParts(Team& team, const LpProblem<Real>& problem, const LpWorkspace<Real>& workspace,
                     Real* split)
      : team_(team), in_(problem), t_(problem.tables), ws_(workspace), split_(split) {}

  // Lists ranks, experts and parts, and writes the split of all other slots. False if the problem cannot be
  // solved: negative loads, 2^31 copies or more, or copies that no rank with speed can take.
  ISOLOAD_HD bool list() {
    if (!add_up()) return false;
    const bool taken = list_ranks();
    return list_experts() && taken && (list_edges(), true);
  }

  ISOLOAD_HD NetworkSide ranks() const { return {num_ranks_, ws_.rank_first, ws_.rank_parts, ws_.part_rank}; }
  ISOLOAD_HD NetworkSide experts() const {
    return {num_experts_, ws_.expert_first, nullptr, ws_.part_expert};
  }
  ISOLOAD_HD int size() const { return num_parts_; }

 private:
  ISOLOAD_HD bool fast(int r) const { return in_.speeds == nullptr || in_.speeds[r] > 0; }

  ISOLOAD_HD bool add_up() {
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
    return !team_.any(sign < 0) && team_.sum(copies) <= INT32_MAX;
  }

  // Ranks with speed, and what they carry already. False if another one carries something.
  ISOLOAD_HD bool list_ranks() {
    const int S = in_.S;
    uint64_t stuck = 0;
    team_.for_each(in_.R, [&](int r) { ws_.rank_at[r] = fast(r); });
    num_ranks_ = team_.scan(ws_.rank_at, in_.R);
    team_.for_each(in_.R, [&](int r) {
      Real burden = in_.base ? in_.base[r] : Real(0);
      ISOLOAD_ROLLED
      for (int p = r * S; p < r * S + S; ++p) {
        split_[p] = t_.solo[p] >= 0 ? static_cast<Real>(ws_.total[t_.solo[p]]) : Real(0);
        burden += split_[p];
      }
      stuck |= !fast(r) && burden > 0;
      if (!fast(r)) return;
      const int a = ws_.rank_at[r];
      ws_.burden[a] = burden;
      ws_.speed[a] = in_.speeds ? in_.speeds[r] : Real(1);
    });
    return !team_.any(stuck);
  }

  // Replicated experts with load. False if no rank can take an expert's copies.
  ISOLOAD_HD bool list_experts() {
    uint64_t stuck = 0;
    team_.for_each(in_.E, [&](int e) {
      stuck |= ws_.total[e] > 0 && t_.copies(e) == 0;
      ws_.expert_at[e] = ws_.total[e] > 0 && t_.copies(e) > 1;
    });
    num_experts_ = team_.scan(ws_.expert_at, in_.E);
    team_.for_each(in_.E, [&](int e) {
      if (ws_.total[e] == 0 || t_.copies(e) < 2) return;
      const int i = ws_.expert_at[e];
      int32_t parts = 0;
      ISOLOAD_ROLLED
      for (int j = t_.offsets[e]; j < t_.offsets[e + 1]; ++j) parts += fast(t_.ranks[j]);
      stuck |= parts == 0;
      ws_.expert_first[i] = parts;
      ws_.load[i] = static_cast<Real>(ws_.total[e]);
      ws_.expert_ground[i] = 0;
    });
    return !team_.any(stuck);
  }

  ISOLOAD_HD void list_edges() {
    const int S = in_.S, P = in_.R * S;
    if (team_.rank() == 0) ws_.expert_first[num_experts_] = 0;
    team_.sync();
    team_.scan(ws_.expert_first, num_experts_ + 1);
    auto expert_in = [&](int p) { return t_.split[p] < 0 ? -1 : t_.order[t_.split[p]]; };
    auto is_part = [&](int p) {
      const int e = expert_in(p);
      return e >= 0 && ws_.total[e] > 0 && fast(p / S);
    };
    team_.for_each(P, [&](int p) { ws_.part_at[p] = is_part(p); });
    num_parts_ = team_.scan(ws_.part_at, P);
    team_.for_each(in_.R, [&](int r) {
      if (fast(r)) ws_.rank_first[ws_.rank_at[r]] = ws_.part_at[r * S];
    });
    if (team_.rank() == 0) ws_.rank_first[num_ranks_] = num_parts_;
    team_.for_each(in_.E, [&](int e) {
      if (ws_.total[e] == 0 || t_.copies(e) < 2) return;
      int k = ws_.expert_first[ws_.expert_at[e]];
      ISOLOAD_ROLLED
      for (int j = t_.offsets[e]; j < t_.offsets[e + 1]; ++j)
        if (fast(t_.ranks[j])) ws_.rank_parts[ws_.part_at[t_.slots[j]]] = k++;
    });
    team_.sync();
    team_.for_each(P, [&](int p) {
      if (!is_part(p)) return;
      const int k = ws_.rank_parts[ws_.part_at[p]];
      ws_.part_rank[k] = ws_.rank_at[p / S];
      ws_.part_expert[k] = ws_.expert_at[expert_in(p)];
      ws_.part_slot[k] = p;
      ws_.part_place[k] = ws_.part_at[p];
    });
    team_.sync();
  }

  Team& team_;
  const LpProblem<Real>& in_;
  const ReplicaTables t_;
  const LpWorkspace<Real>& ws_;
  Real* const split_;
  int num_ranks_ = 0, num_experts_ = 0, num_parts_ = 0;
};

}  // namespace isoload
