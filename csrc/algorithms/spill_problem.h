// spill_problem: what plan_spill is given, what it returns, what every try to spill one layer reads, and all
// their memory.
#pragma once

#include <cstdint>

#include "algorithms/spare_fill.h"
#include "host_device.h"
#include "workspace.h"

namespace isoload {

constexpr int kSpillWays = 4, kSpillRounds = 3, kSpillFine = 1000;
constexpr int kLevelWays = 2, kLevelRounds = 5, kLevelFirst = 4, kLevelFine = 10000;
constexpr int kSpillProbes = 4;
constexpr int kSpillStates = kSpillWays + 2;  // two plans are kept while others are tried
constexpr int64_t kMillion = 1000000;

enum class SpillStatus : int32_t { ok = 0, negative = 1, too_many_copies = 2, none_alive = 3 };

enum SpillFlag : int32_t {
  kBelowThreshold = 1,
  kNoSpareSlot = 2,
  kEgressLimit = 4,
  kImmovable = 8,
  kSmallExcess = 16
};

// What lending costs and where it ends.
struct SpillRules {
  int32_t min_chunk;            // copies
  int32_t near_cost, far_cost;  // of an import in copies, at most 2^30; from the own node, from another
  int32_t egress;               // most exports of a rank
  bool within;                  // experts do not leave the node of their home
};

struct SpillProblem : FillProblem, SpillRules {  // with empty spare slots; loads summed over sources here
  const int32_t* start;  // [P] copies per slot before anything is lent, or null: all in home slots
  int64_t capacity_ppm, threshold_ppm;  // of the mean; capacity 0 = search for the least cost
  bool per_expert;                      // the threshold is about experts, not about ranks
  int64_t tolerance_ppm;
};

struct SpillResult {
  int32_t *slot_to_expert, *quota;  // [P]
  int64_t* level;                   // [1] the capacity, or the largest cost where that was searched
  int32_t* telemetry;  // [5] imports, most imports and exports of a rank, imports from other nodes, flags
};

// What all tries of one layer share.
struct SpillView : SpillRules {
  int R, S, per_node, spare;      // ranks, slots per rank, ranks per node, spare slots: the last of each rank
  const int32_t* slot_to_expert;  // [P] with the spare slots empty
  const int32_t* home_slot;       // [E] where an expert's weights come from
  const int32_t *rank, *node;     // [P] of each slot; [R] of each rank
  const int32_t* start;           // [P] copies in the resident slots before anything is lent
  const int32_t* load;            // [R] copies of these and of what cannot move
  const int32_t* order;           // [R] ranks, busiest first
  int32_t busiest;                // largest load
  bool replicated;                // whether an expert has more than its home slot
  int32_t min_excess;             // a rank that is above the target by less lends nothing (more)

  ISOLOAD_HD int32_t import_cost(bool near) const { return near ? near_cost : far_cost; }
  ISOLOAD_HD int32_t least_import_cost() const { return near_cost < far_cost ? near_cost : far_cost; }
  // Ranks that lend to each other: the nodes, or all ranks. Without a division where that is all.
  ISOLOAD_HD int group_size() const { return within ? per_node : R; }
  ISOLOAD_HD int num_groups() const { return within ? R / per_node : 1; }
  ISOLOAD_HD int group(int r) const { return within ? node[r] : 0; }
  ISOLOAD_HD int owner(int e) const { return rank[home_slot[e]]; }  // the rank that lends it
  ISOLOAD_HD bool near(int q, int r) const { return node[q] == node[r]; }
  // The slot of an expert on a rank that holds it already, or -1. The rank's spare slots first .. free hold
  // what the slots `lender` held; without replicas no rank is offered an expert that it holds.
  ISOLOAD_HD int held(int e, int r, const int32_t* lender, int first, int free) const {
    if (!replicated) return -1;
    const int end = r * S + S;
    ISOLOAD_ROLLED
    for (int p = r * S; p < end - spare; ++p)
      if (slot_to_expert[p] == e) return p;
    ISOLOAD_ROLLED
    for (int p = end - first; p < end - free; ++p)
      if (slot_to_expert[lender[p]] == e) return p;
    return -1;
  }
};

// The memory of one try.
struct SpillState : Workspace<SpillState> {
  int32_t* cost;            // [R] at most the largest load or the target
  int32_t *free, *exports;  // [R] spare slots left; experts lent
  int32_t* open;            // [4, R] of OpenRanks
  int32_t* quota;           // [P]
  int32_t* lender;          // [P] the slot that an import's copies are from, in its spare slot
  int32_t* rests;           // [P] slots of which a level has lent a part

  template <class Take>
  ISOLOAD_HD void lay_out(int64_t R, int64_t P, Take&& take) {
    take(InPacks{R}, cost, free, exports), take(InPacks{4 * R}, open);
    take(InPacks{P}, quota, lender, rests);
  }
};
constexpr int32_t kClosed = INT32_MAX;

// A try's state before anything is lent, but for what is open. A lane has the ranks that for_each gives it.
template <class Group>
ISOLOAD_HD void begin(Group& group, const SpillView& view, const SpillState& to, const int32_t* free) {
  const int32_t *const start = view.start, *const load = view.load;  // for the compiler, to which a store
  int32_t *const quota = to.quota, *const cost = to.cost, *const left = to.free, *const exports = to.exports;
  group.for_each(view.R * view.S, [=](int p) { quota[p] = start[p]; });  // might change the view
  group.for_each(view.R, [=](int r) { cost[r] = load[r], left[r] = free[r], exports[r] = 0; });
}

// The largest cost of a rank.
template <class Group>
ISOLOAD_HD int32_t largest_cost(Group& group, const SpillView& view, const SpillState& of) {
  int32_t largest = 0;
  group.for_each(view.R, [&](int r) { largest = of.cost[r] > largest ? of.cost[r] : largest; });
  return group.max32(largest);
}

// Where the copies are before anything is lent.
struct SpillStart : Workspace<SpillStart> {
  int32_t *copies, *load, *order;  // [P]; [R]; [R] ranks, busiest first

  template <class Take>
  ISOLOAD_HD void lay_out(int64_t R, int64_t P, Take&& take) {
    take(InPacks{P}, copies), take(InPacks{R}, load, order);
  }
};

struct SpillWorkspace : Workspace<SpillWorkspace> {
  int64_t R, P;
  int64_t* room;                    // [kSpillProbes] at levels that are looked at together
  int32_t *reached, *above;         // [kSpillStates] cost of each try; copies above its level
  int32_t* flags;                   // [kSpillStates] of each try
  int32_t *total, *free, *node;     // [E]; [R]; [R] of each rank
  int32_t *rank, *queue;            // [P] of each slot; [P] slots whose copies may be lent
  int32_t *index, *slots, *copies;  // [P] to find them
  char *starts, *tries;             // of both starts; of all states

  // As the caller says, or with all copies in their home slots.
  ISOLOAD_HD SpillStart start(bool home) const {
    return SpillStart::at(starts + home * SpillStart::bytes(R, P), R, P);
  }
  ISOLOAD_HD SpillState state(int k) const {
    return SpillState::at(tries + k * SpillState::bytes(R, P), R, P);
  }
  template <class Take>
  ISOLOAD_HD void lay_out(int64_t num_ranks, int64_t E, int64_t num_slots, Take&& take) {
    R = num_ranks, P = num_slots;
    take(kSpillProbes, room), take(InPacks{kSpillStates}, reached, above, flags);
    take(InPacks{E}, total), take(InPacks{R}, free, node),
        take(InPacks{P}, rank, queue, index, slots, copies);
    take(2 * SpillStart::bytes(R, P), starts), take(kSpillStates * SpillState::bytes(R, P), tries);
  }
};

}  // namespace isoload
