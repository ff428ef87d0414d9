// One layer while it is searched: which expert lies where, and what every slot carries in every scenario.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace isoload::placers {

// Sums run in four lanes, always in this order: so compilers may use vectors, and NumPy finds the same bits.
constexpr int kLanes = 4;

// Compiled once more for CPUs with AVX2, whose vectors hold all lanes; the loader picks. The same bits:
// neither version contracts a product and a sum (-ffp-contract=off), nor reorders. A sanitizer would run in
// the loader.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__) && !defined(ISOLOAD_ONE_TARGET)
#define ISOLOAD_WIDE __attribute__((target_clones("avx2", "default")))
#else
#define ISOLOAD_WIDE
#endif

// The sum of term(0) .. term(n - 1), n a multiple of kLanes. Indices as wide as an address: under -fwrapv,
// with which Python compiles extensions, the four of an int need not be neighbours, and nothing is a vector.
template <class Term>
[[gnu::always_inline]] inline double lane_sum(int64_t n, const Term& term) {
  double lane[kLanes] = {};
  for (int64_t s = 0; s < n; s += kLanes) {
    for (int64_t k = 0; k < kLanes; ++k) lane[k] += term(s + k);
  }
  return (lane[0] + lane[1]) + (lane[2] + lane[3]);
}

// What a layer's search reads. Loads are whole numbers, so sums of them are exact in any order.
struct Problem {
  int experts, ranks, width;  // width: slots that a rank has at most, absent ones included
  int scenarios;              // n, a multiple of kLanes; those added have weight 0
  const double* load;         // [E, n]
  const double* weight;       // [n]
  const double* tick;         // [R] cost of one copy
  const int32_t* capacity;    // [R] slots that may hold experts
  const int32_t* node;        // [R]
  const int32_t* home;        // [E] node that must keep a copy; -1 = none must
  bool exact;  // a replicated expert's load goes where it levels the ranks; else in equal parts
};

// Ranks with a slot that may hold an expert.
inline int open_ranks(const int32_t* capacity, int ranks) {
  return static_cast<int>(std::count_if(capacity, capacity + ranks, [](int c) { return c > 0; }));
}

// Row i of rows of n numbers.
template <class Rows>
auto* row_of(Rows& rows, int i, size_t n) {
  return rows.data() + i * n;
}

// The busiest rank's cost in every scenario, of loads [R, n].
inline std::vector<double> peaks_of(const Problem& problem, const std::vector<double>& loads) {
  std::vector<double> peak(problem.scenarios);
  for (int r = 0; r < problem.ranks; ++r) {
    const double *load = row_of(loads, r, peak.size()), tick = problem.tick[r];
    for (size_t s = 0; s < peak.size(); ++s) peak[s] = std::max(peak[s], load[s] * tick);
  }
  return peak;
}

// The mean of that over scenarios.
inline double objective_of(const Problem& problem, const std::vector<double>& loads) {
  const std::vector<double> peak = peaks_of(problem, loads);
  return lane_sum(problem.scenarios, [&](int64_t s) { return problem.weight[s] * peak[s]; });
}

struct Layout {
  explicit Layout(const Problem& given)
      : problem(&given),
        slot(static_cast<size_t>(given.ranks) * given.width, -1),
        copies(given.experts),
        at_home(given.experts),
        holds(static_cast<size_t>(given.ranks) * given.experts),
        share(slot.size() * given.scenarios),
        rank_load(static_cast<size_t>(given.ranks) * given.scenarios) {}

  int rank_of(int p) const { return p / problem->width; }
  const double* load_of(int e) const { return problem->load + static_cast<size_t>(e) * problem->scenarios; }
  double* share_of(int p) { return row_of(share, p, problem->scenarios); }
  const double* share_of(int p) const { return row_of(share, p, problem->scenarios); }
  double* load_on(int r) { return row_of(rank_load, r, problem->scenarios); }
  const double* load_on(int r) const { return row_of(rank_load, r, problem->scenarios); }
  bool held(int r, int e) const { return holds[static_cast<size_t>(r) * problem->experts + e]; }

  // Notes that slot p holds expert e, or (sign = -1) no longer does. Shares are the caller's.
  void note(int p, int e, int sign) {
    const int r = rank_of(p);
    slot[p] = sign > 0 ? e : -1;
    copies[e] += sign;
    at_home[e] += problem->node[r] == problem->home[e] ? sign : 0;
    holds[static_cast<size_t>(r) * problem->experts + e] = sign > 0;
  }

  // The load of slot p changes to row.
  void carry(int p, const double* row) {
    double *own = share_of(p), *rank = load_on(rank_of(p));
    for (int s = 0; s < problem->scenarios; ++s) rank[s] += row[s] - own[s], own[s] = row[s];
  }

  // Equal parts of expert e's load, rounded down, for its slots.
  void split_evenly(int e) {
    std::vector<double> part(problem->scenarios);
    for (int s = 0; s < problem->scenarios; ++s) part[s] = whole(load_of(e)[s] / copies[e]);
    for (int p = 0; p < static_cast<int>(slot.size()); ++p) {
      if (slot[p] == e) carry(p, part.data());
    }
  }

  // Slot p holds nothing any more; a copy that is left (the lowest) takes over what it carried.
  void clear(int p) {
    const int e = slot[p];
    note(p, e, -1);
    double *own = share_of(p), *rank = load_on(rank_of(p));
    const auto heir = std::find(slot.begin(), slot.end(), e);
    for (int s = 0; s < problem->scenarios; ++s) {
      rank[s] -= own[s];
      if (heir != slot.end()) {
        const int q = static_cast<int>(heir - slot.begin());
        share_of(q)[s] += own[s], load_on(rank_of(q))[s] += own[s];
      }
      own[s] = 0;
    }
  }

  // Rounded down; loads stay below 2^31.
  static double whole(double x) { return static_cast<double>(static_cast<int32_t>(x)); }

  double objective() const { return objective_of(*problem, rank_load); }

  const Problem* problem;
  std::vector<int32_t> slot;      // [R, width]; -1 = empty
  std::vector<int> copies;        // [E]
  std::vector<int> at_home;       // [E] copies on the home node
  std::vector<uint8_t> holds;     // [R, E]
  std::vector<double> share;      // [R, width, n] what each slot carries
  std::vector<double> rank_load;  // [R, n]
};

}  // namespace isoload::placers
