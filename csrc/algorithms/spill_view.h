// spill_view: what every try to spill one layer reads, and the memory that each has for itself.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace isoload {

enum SpillFlag : int32_t {
  kBelowThreshold = 1,
  kNoSpareSlot = 2,
  kEgressLimit = 4,
  kImmovable = 8,
  kSmallExcess = 16
};

// What all tries of one layer share.
struct SpillView {
  int R, S, per_node, spare;      // ranks, slots per rank, ranks per node, spare slots: the last of each rank
  const int32_t* slot_to_expert;  // [P] with the spare slots empty
  const int32_t* home_slot;       // [E] where an expert's weights come from
  const int32_t* start;           // [P] copies in the resident slots before anything is lent
  const int32_t* load;            // [R] copies of these and of what cannot move
  const int32_t* order;           // [R] ranks, busiest first
  int64_t busiest;                // largest load
  bool replicated;                // whether an expert has more than its home slot
  int64_t min_excess, min_chunk;  // copies; a rank that is above the target by less lends nothing (more)
  int64_t import_cost[2];         // in copies; of an expert from another node, from the own
  int32_t egress;                 // most exports of a rank
  bool within;                    // experts do not leave the node of their home

  ISOLOAD_HD int64_t least_import_cost() const {
    return import_cost[0] < import_cost[1] ? import_cost[0] : import_cost[1];
  }
  // Ranks that lend to each other: the nodes, or all ranks. Without a division where that is all.
  ISOLOAD_HD int group_size() const { return within ? per_node : R; }
  ISOLOAD_HD int num_groups() const { return within ? R / per_node : 1; }
  ISOLOAD_HD int group(int r) const { return within ? r / per_node : 0; }
  ISOLOAD_HD int owner(int e) const { return home_slot[e] / S; }  // the rank that lends it
  // The slot of an expert on a rank that holds it already, or -1. The rank's spare slots first .. free hold
  // what the slots `lender` held; without replicas no rank is offered an expert that it holds.
  ISOLOAD_HD int held(int e, int r, const int32_t* lender, int first, int free) const {
    if (!replicated) return -1;
    const int end = r * S + S;
    for (int p = r * S; p < end - spare; ++p)
      if (slot_to_expert[p] == e) return p;
    for (int p = end - first; p < end - free; ++p)
      if (slot_to_expert[lender[p]] == e) return p;
    return -1;
  }
};

// Caller's memory of one try.
struct SpillState {
  int64_t* heap;  // [R] of a level: ranks that have taken or given and may take; `filled` has the sizes
  int32_t* cost;  // [R] at most the largest load or the target
  int32_t *free, *exports;   // [R] spare slots left; experts lent
  int32_t *takers, *filled;  // [R] the same of the greedy, the fullest first, then the lowest; their cost
  int32_t* quota;            // [P]
  int32_t* lender;           // [P] the slot that an import's copies are from, in its spare slot
  int32_t* rests;            // [P] slots of which a level has lent a part, most copies first
};

// A try's state before anything is lent.
ISOLOAD_HD inline void begin(const SpillView& view, const SpillState& to, const int32_t* free) {
  const int P = view.R * view.S, R = view.R;  // for the compiler, to which a store might change the view
  const int32_t *const start = view.start, *const load = view.load;
  for (int p = 0; p < P; ++p) to.quota[p] = start[p];
  for (int r = 0; r < R; ++r) to.cost[r] = load[r];
  for (int r = 0; r < R; ++r) to.free[r] = free[r];
  for (int r = 0; r < R; ++r) to.exports[r] = 0;
}

}  // namespace isoload
