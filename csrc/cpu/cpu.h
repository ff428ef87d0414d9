// The CPU side of every op on plain pointers: loops over SerialTeam. csrc/ops checks, allocates and calls.
#pragma once

#include <cstdint>

#include "algorithms/plan_exact.h"
#include "algorithms/plan_lp.h"
#include "algorithms/replica_tables.h"
#include "algorithms/round_split.h"
#include "algorithms/share.h"
#include "team.h"

namespace isoload::cpu {

// counts [E] += occurrences of each id; -1 is skipped. Returns the first id outside [-1, E), or -1.
template <class Id>
int64_t count(const Id* ids, int64_t n, int E, int32_t* counts);

void replica_tables(const int32_t* slot_to_expert, int R, int E, int S, int32_t* tables);

PlanStatus plan_exact(const ExactProblem& problem, const ExactResult& result);

// False if the problem cannot be solved, see LpParts::list.
template <class Real>
bool plan_lp(const LpProblem<Real>& problem, const LpResult<Real>& result);

// False if the loads cannot be planned, see Rounding::run.
template <class Real>
bool round_split(const RoundingProblem<Real>& problem, int32_t* quota);

// The wanted rows of the share, out [rows, P]. Returns an expert whose quota was not made from its loads, or
// -1.
int share(const ShareProblem& problem, int32_t* out);

// What a route did not fit: an id outside [-1, E), or an expert with more or fewer copies than its share.
struct RouteFault {
  enum Kind { none, bad_id, not_the_share, bad_weight } kind = none;
  int64_t value = 0;  // the id, the expert, or the slot
};

template <class Id>
RouteFault route(const Id* ids, int64_t T, int K, int E, int P, const ReplicaTables& tables,
                 const int32_t* share_row, bool prefer_visited, Id* slots);

template <class Id>
RouteFault route_sampled(const Id* ids, int64_t n, int E, const ReplicaTables& tables, const float* weights,
                         uint64_t seed, Id* slots);

}  // namespace isoload::cpu
