// The CPU side of every op that is no planner of its own (planner.h), on plain pointers. csrc/ops checks,
// allocates and calls.
#pragma once

#include <cstdint>

#include "algorithms/borrow.h"
#include "algorithms/plan_exact.h"
#include "algorithms/plan_own.h"
#include "algorithms/replica_tables.h"
#include "algorithms/route_shared_sampled.h"
#include "host_device.h"
#include "random_word.h"
#include "team.h"

namespace isoload::cpu {

// A copy's number: how many of the same expert come before it in its part, a run of kPartRows tokens. Parts
// can be numbered apart, and the plan is not needed for it.
constexpr int64_t kPartRows = 128;
constexpr int64_t num_parts(int64_t T) { return (T + kPartRows - 1) / kPartRows; }

// counts [E]; numbers [T, K], -1 for a masked copy; parts [num_parts(T), E] copies of each expert in each
// part.
struct Counts {
  int32_t *counts, *numbers, *parts;
};

// Counts ids [T, K] of E experts. With shared ones, whose ids follow, it counts columns [T, K + num_shared]:
// the ids, then the shared experts' where a row has a choice, -1 where it has none. Returns the first id
// outside [-1, E), or -1.
template <class Id>
int64_t count(const Id* ids, int64_t T, int K, int E, int num_shared, Id* columns, const Counts& out);

// Copies the homes' rows to this rank's spare pools [W], sizes in bytes.
void borrow(const Borrowing& in, const Rows* spare);

// Adds the rows of all ranks' gradient pools to this rank's totals [W], sizes in values; by rank, then slot.
template <class Value, class Total>
void borrow_backward(const Borrowing& in, const Rows* totals, int64_t num_rows);

// What a route did not fit: an id outside [-1, E), an expert with more or fewer copies than its share, other
// shared columns, or a weight.
struct RouteFault {
  enum Kind { none, bad_id, not_the_share, not_shared, bad_weight } kind = none;
  int64_t value = 0;  // the id, the expert, the row, or the slot
};

// What slots could not be made of: an id outside [-1, E), or counts that the planner refused.
struct BalanceFault {
  enum Kind { none, bad_id, not_planned } kind = none;
  int64_t value = 0;  // the id
};

// ids [n] to counts [E] and slots [n], by plan_own of these counts, and by plan_exact: loads [R, E], those of
// rank 0 and of the others, which have none. in: of the counts or loads, which need not be there yet.
template <class Id>
BalanceFault balance_own(const Id* ids, int64_t n, OwnProblem in, int32_t* counts, Id* slots);
template <class Id>
BalanceFault balance_same(const Id* ids, int64_t n, const ExactProblem& in, int32_t* loads,
                          const ExactResult& out, Id* slots);

template <class Id>
RouteFault route_sampled(const Id* ids, int64_t n, int E, const ReplicaTables& tables, const float* weights,
                         const Stream& words, Id* slots);

// Where the shared copies go: S slots per rank instead of routed_per_rank, the shared ones after the routed.
struct SharedLayout {
  int64_t routed_per_rank, slots_per_rank;
  double weight;  // of every shared copy
};

struct LayoutFault {
  enum Kind { none, bad_slot, bad_rank, too_large } kind = none;
  int64_t value = 0;  // the slot given, the rank, or the slot that does not fit
};

// slots, weights [T, K] and ranks [T, n] become new_slots, new_weights [T, K + n].
template <class Id, class Weight>
LayoutFault append_shared_expert(const Id* slots, const Weight* weights, const int32_t* ranks, int64_t T,
                                 int K, int n, const SharedLayout& layout, Id* new_slots,
                                 Weight* new_weights);

// slots [T, K] to ranks [T]. Returns the first slot outside [-1, R * slots_per_rank), or -1.
template <class Id>
int64_t route_shared_sampled(const Id* slots, int64_t T, int K, const SharedDraw& draw, int32_t* ranks);

// The shared copies of one rank's tokens.
struct SharedRoute {
  int64_t T;
  int K, R, S, home, num_shared;
  const int32_t* source_quota;  // [R] sums to num_shared * tokens with a slot, or holds as much if strict
  bool strict;
  int slots_width, width;  // of a row of slots, and of one that is written
  int first_shared;        // their place on every rank, where slots are written; -1: ranks are
  ISOLOAD_HD int64_t written(int rank, int column) const {
    return rank < 0 || first_shared < 0 ? rank : int64_t(rank) * S + first_shared + column;
  }
};

// What a row of the share did not fit: a slot outside [-1, R * S), or the tokens that have a slot.
struct SharedFault {
  enum Kind { none, bad_slot, not_the_share } kind = none;
  int64_t value = 0;  // the slot, or num_shared * tokens
};

// What count found in the ids; row c of parts begins at parts + c * stride, and may be longer than E.
struct Numbered {
  const int32_t *numbers, *parts;
  int64_t stride;
};

// The copies of one rank's tokens: K columns of routed experts, then those of the shared ones, E and on.
struct Route {
  int64_t T;
  int K, E, P;
  ReplicaTables tables;
  Numbered numbered;
  const int32_t* send_counts;  // [P]
  SharedRoute shared;          // without a source_quota its copies go home

  ISOLOAD_HD int width() const { return K + shared.num_shared; }
  // The slot of the first shared expert; -1: route_shared deals their copies.
  int32_t home_slot() const {
    return shared.source_quota ? -1 : shared.home * shared.S + shared.first_shared;
  }
};
struct ColumnsFault {
  RouteFault routed;
  SharedFault shared;
};
template <class Id>
ColumnsFault route(const Route& in, const Id* ids, Id* slots);

template <class Id, class Out>
SharedFault route_shared(const SharedRoute& problem, const Id* slots, Out* out);

// The tokens of one rank and where their copies may go: slot p is on rank p / S.
struct RowSpace {
  int64_t T;
  int K, R, S;

  // Most ranks of a token.
  ISOLOAD_HD int width() const { return K < R ? K : R; }
  // R for an absent copy, which any slot outside 0..R*S-1 is.
  ISOLOAD_HD int rank_of(int64_t slot) const {
    if (slot < 0 || slot > INT32_MAX) return R;
    const uint32_t rank = static_cast<uint32_t>(slot) / static_cast<uint32_t>(S);
    return rank < static_cast<uint32_t>(R) ? static_cast<int>(rank) : R;
  }
};

// slots [T, K] to ranks [T, D], a token's ranks ascending, then R; numbers [T, D], each row's number among
// those to its rank by token, then -1; counts [2, R], the rows and the copies to every rank.
template <class Slot>
void number_rows(const Slot* slots, const RowSpace& space, int32_t* ranks, int32_t* numbers, int64_t* counts);

// The rows that one rank sends, as bytes: a token's row, then from slots_at int32 [K] the slots of its copies
// on the row's rank (-1 elsewhere), then from weights_at [K] their weights (0 elsewhere). A padding row has
// zeros for values: what experts compute of it is finite.
struct RowPacking {
  RowSpace space;
  int64_t num_rows, capacity;  // capacity rows to every rank, or 0: as many as there are
  int64_t row_bytes, slots_at, weights_at, bytes;
};
struct PackedRows {
  char* payload;           // [num_rows, bytes]
  int64_t* row_to_token;   // [num_rows] T where the row is padding
  int64_t* row_to_rank;    // [num_rows] R where the row is padding
  int64_t* token_to_rows;  // [T, D] num_rows where there is none
};
template <class Slot, class Weight>
void pack_rows(const char* x, const Slot* slots, const Weight* weights, const int32_t* ranks,
               const int32_t* numbers, const int64_t* counts, const RowPacking& in, const PackedRows& out);

// The copies [n] whose local slots are first .. first + num_slots - 1, and the places that they get.
struct CopyGroup {
  int64_t n, first;
  int num_slots;
  int64_t num_places;
};
struct Groups {
  int64_t *copy, *slot;  // [num_places] behind the copies 0 and num_slots - 1
  int32_t* ends;         // [num_slots]
  int64_t* position;     // [n] num_places where absent
};
// Sorts them by slot, stable. Returns how many there are; more than places: nothing but ends is written.
template <class Slot>
int64_t group_copies(const Slot* slots, const CopyGroup& group, const Groups& out);

}  // namespace isoload::cpu
