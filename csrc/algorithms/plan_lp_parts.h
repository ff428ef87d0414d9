// The linear program of plan_lp, listed from the replica tables: which copies have a choice of rank.
//
// A part is what one rank takes of one replicated expert with load. Experts with one replica have no choice
// of rank: their copies are their rank's burden, like the base load.
//
// An edge is a rank's slack or a part. Edge r is the slack of rank r. The parts follow by slot, so every
// rank's parts have consecutive numbers.
#pragma once

#include <climits>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "algorithms/cholesky.h"
#include "algorithms/replica_tables.h"
#include "host_device.h"

namespace isoload {

template <class Real>
struct LpProblem : SplitProblem {
  const Real* base;  // [R] >= 0 copies that a rank carries besides, or null
  Real tolerance;    // converged when primal - dual <= tolerance * primal
  int iterations;    // most
};

enum class LpStatus : int32_t { converged = 0, open = 1, broke_down = 2 };

template <class Real>
struct LpResult {
  Real* split;          // [P] copies per slot
  Real *primal, *dual;  // [1] largest rank load of the split; proved lower bound
  int32_t *iterations, *status;
};

// Caller's memory; every array is written before it is read.
template <class Real>
struct LpWorkspace {
  Real *x, *z;                    // [edges] a part's copies and reduced cost; a rank's slack and price
  Real *dx, *dz, *weight;         // [edges] their steps; x / z
  Real *burden, *cost;            // [R] copies that cannot move; load of the split
  Real *rank_excess, *product;    // [R] what the rank's equation lacks; sum of x z over its edges
  Real *load, *scale, *value;     // [experts]; load / sum of the parts; its term of the bound
  Real* expert_excess;            // [experts] what the expert's equation lacks
  Real *rank_step, *expert_step;  // [kFlows, R], [kFlows, experts] price steps: of now, and of pivots 1
  Real* sums;                     // of Sums
  CholeskyWorkspace<Real> cholesky;
  int32_t *total, *numbers;                   // [E] copies; [P + E] of LpParts
  int32_t* rank_first;                        // [R + 1] edges
  int32_t *expert_first, *expert_end, *list;  // [experts] in list; [P] edges
  int32_t *edge_rank, *edge_expert;           // [edges]; experts of parts alone

  ISOLOAD_HD LpWorkspace(void* memory, int64_t R, int64_t E, int64_t P) {
    char* next = static_cast<char*>(memory);
    lay_out(R, E, P, [&](auto*& array, int64_t length) {
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(next);
      next += padded(length * sizeof(*array));
    });
  }
  ISOLOAD_HD static int64_t size(int64_t R, int64_t E, int64_t P) {
    int64_t bytes = 0;
    LpWorkspace().lay_out(R, E, P,
                          [&](auto*& array, int64_t length) { bytes += padded(length * sizeof(*array)); });
    return bytes;
  }

 private:
  LpWorkspace() = default;

  ISOLOAD_HD static int64_t padded(int64_t bytes) { return (bytes + 15) & ~int64_t(15); }

  // take(array, length) of all.
  template <class Take>
  ISOLOAD_HD void lay_out(int64_t R, int64_t E, int64_t P, Take&& take) {
    const int64_t fewer = R < E ? R : E, more = R < E ? E : R;
    for (Real** array : {&x, &z, &dx, &dz, &weight, &cholesky.share}) take(*array, R + P);
    for (Real** array : {&burden, &cost, &rank_excess, &product}) take(*array, R);
    for (Real** array : {&load, &scale, &value, &expert_excess}) take(*array, E);
    take(rank_step, kFlows * R), take(expert_step, kFlows * E);
    take(sums, 2 * kSums * kSumColumns), take(cholesky.columns, 2 * kSumColumns);
    take(cholesky.rows, fewer * row_length(fewer)), take(cholesky.diagonal, more);
    take(cholesky.excess, fewer), take(cholesky.inverse, fewer), take(cholesky.middle, kFlows * fewer);
    take(total, E), take(numbers, P + E), take(rank_first, R + 1);
    take(expert_first, E), take(expert_end, E), take(list, P);
    take(edge_rank, R + P), take(edge_expert, R + P);
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
        part_at_(workspace.numbers),
        expert_at_(part_at_ + P_) {}

  // Lists parts and experts, and writes the split of all other slots. False if the problem cannot be solved:
  // negative loads, 2^31 copies or more, or copies of an expert without a replica. A barrier last.
  ISOLOAD_HD bool list() {
    if (!add_up()) return false;
    const int split = t_.num_split();
    team_.for_each(split, [&](int i) { expert_at_[i] = ws_.total[t_.order[i]] > 0; });
    team_.for_each(P_, [&](int p) {
      const int solo = t_.solo[p], i = t_.split[p];
      part_at_[p] = i >= 0 && ws_.total[t_.order[i]] > 0;
      ws_.dx[p] = split_[p] = solo >= 0 ? static_cast<Real>(ws_.total[solo]) : Real(0);
    });
    team_.sync();
    const int all = team_.scan(ws_.numbers, P_ + split);
    num_parts_ = split > 0 ? expert_at_[0] : 0;
    num_experts_ = all - num_parts_;
    Real heaviest = 0;
    team_.for_each(in_.R, [&](int r) { list_rank(r, heaviest); });
    if (num_parts_ > 0) {
      team_.for_each(P_, [&](int p) { list_part(p); });
      team_.for_each(split, [&](int i) { list_expert(i, i + 1 < split ? expert_at_[i + 1] : all); });
    }
    heaviest_burden_ = largest(team_, heaviest);
    return true;
  }

  ISOLOAD_HD Side ranks() const {
    return {in_.R, ws_.rank_first, ws_.rank_first + 1, nullptr, ws_.edge_rank};
  }
  ISOLOAD_HD Side experts() const {
    return {num_experts_, ws_.expert_first, ws_.expert_end, ws_.list, ws_.edge_expert};
  }
  ISOLOAD_HD int num_edges() const { return in_.R + num_parts_; }
  // A bound on the largest load without prices: what cannot move.
  ISOLOAD_HD Real heaviest_burden() const { return heaviest_burden_; }
  // write(p, k) for every part k and its slot p.
  template <class F>
  ISOLOAD_HD void for_parts(F&& write) const {
    if (num_parts_ == 0) return;
    team_.for_each(P_, [&](int p) {
      if (is_part(p)) write(p, in_.R + part_at_[p]);
    });
  }

 private:
  // Where there are parts, part_at_[P] is their number.
  ISOLOAD_HD bool is_part(int p) const { return part_at_[p + 1] > part_at_[p]; }

  // Every expert's copies. A barrier last.
  ISOLOAD_HD bool add_up() {
    constexpr int64_t kTooMany = int64_t(INT32_MAX) + 1;
    int64_t copies = 0;
    bool taken = true;
    team_.for_each(in_.E, [&](int e) {
      int64_t total = 0;
      ISOLOAD_ROLLED
      for (int s = 0; s < in_.num_sources; ++s) {
        const int32_t load = in_.loads[int64_t(s) * in_.E + e];
        taken &= load >= 0;
        total += load;
      }
      copies += total;
      taken &= total == 0 || t_.copies(e) > 0;
      ws_.total[e] = static_cast<int32_t>(total);
    });
    return team_.sum(taken ? copies : kTooMany) < kTooMany;
  }

  ISOLOAD_HD void list_rank(int r, Real& heaviest) {
    const int S = in_.S;
    Real burden = in_.base ? in_.base[r] : Real(0);
    ISOLOAD_ROLLED
    for (int p = r * S; p < r * S + S; ++p) burden += ws_.dx[p];
    heaviest = burden > heaviest ? burden : heaviest;
    ws_.burden[r] = burden;
    ws_.rank_first[r] = in_.R + (num_parts_ > 0 ? part_at_[r * S] : 0);
    ws_.edge_rank[r] = r;
    if (r == 0) ws_.rank_first[in_.R] = num_edges();
  }

  ISOLOAD_HD void list_part(int p) {
    if (!is_part(p)) return;
    const int k = in_.R + part_at_[p];
    ws_.edge_rank[k] = p / in_.S;
    ws_.edge_expert[k] = expert_at_[t_.split[p]] - num_parts_;
  }

  ISOLOAD_HD void list_expert(int i, int next) {
    if (next == expert_at_[i]) return;
    const int e = t_.order[i], a = expert_at_[i] - num_parts_;
    ws_.load[a] = static_cast<Real>(ws_.total[e]);
    ws_.expert_first[a] = t_.offsets[e];
    ws_.expert_end[a] = t_.offsets[e + 1];
    ISOLOAD_ROLLED
    for (int j = t_.offsets[e]; j < t_.offsets[e + 1]; ++j) ws_.list[j] = in_.R + part_at_[t_.slots[j]];
  }

  Team& team_;
  const LpProblem<Real>& in_;
  const ReplicaTables t_;
  const LpWorkspace<Real>& ws_;
  Real* const split_;
  const int P_;
  // [P], [split experts] of ws_.numbers: 1 for what is listed, then how many stand before. The second goes on
  // from the first, so it counts the parts, too.
  int32_t *const part_at_, *const expert_at_;
  int num_parts_ = 0, num_experts_ = 0;
  Real heaviest_burden_ = 0;
};

}  // namespace isoload
