// What the ops that are no planners of their own (planner.h) take and find wrong, on plain pointers, on the
// CPU (X.h here) and on CUDA.
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

// Slots of ranks with S slots instead of `routed`, behind which come those of the shared experts.
template <class Id, class Weight>
struct SharedAppend {
  const Id* slots;        // [T, K]
  const Weight* weights;  // [T, K]
  const int32_t* ranks;   // [T, n] where the shared copies go
  int64_t T;
  int K, n;
  int64_t routed, S;
  Weight shared_weight;  // of every shared copy
  Id* new_slots;         // [T, K + n]
  Weight* new_weights;   // [T, K + n]
};

struct LayoutFault {
  enum Kind { none, bad_slot, bad_rank, too_large } kind = none;
  int64_t value = 0;  // the slot given, the rank, or the slot that does not fit
};

// The shared copies of one rank's tokens.
struct SharedRoute {
  int64_t T;
  int K, R, S, home, num_shared;
  const int32_t* source_quota;  // [R] sums to num_shared * tokens with a slot
  int slots_width, width;       // of a row of slots, and of one that is written
  int first_shared;             // their place on every rank, where slots are written; -1: ranks are
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

// The replica of expert e that a word of 64 bits draws by weights [P], which sum to total > 0. 24 of its bits
// as a float in [0, 1) are exact, so every device draws the same.
ISOLOAD_HD inline int draw_slot(const ReplicaTables& t, int e, const float* weights, float total,
                                uint64_t word) {
  float left = static_cast<float>(word >> 40) * 0x1p-24f * total;
  int chosen = -1;
  for (int j = t.offsets[e]; j < t.offsets[e + 1]; ++j) {
    const float weight = weights[t.slots[j]];
    if (weight > 0) chosen = t.slots[j];  // rounding may leave a crumb after the last: it keeps that one
    if (left < weight) break;
    left -= weight;
  }
  return chosen;
}

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
struct Packing {
  const char* x;                   // [T, row_bytes]
  const Slot* slots;               // [T, K]
  const Weight* weights;           // [T, K]
  const int32_t *ranks, *numbers;  // [T, D]
  const int64_t* counts;           // [R]
  RowPacking in;
  PackedRows out;
};

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

}  // namespace isoload::cpu
