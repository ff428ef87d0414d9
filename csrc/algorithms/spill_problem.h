// spill_problem: what plan_spill is given, what it returns, and its memory.
#pragma once

#include <cstdint>

#include "algorithms/spare_fill.h"
#include "algorithms/spill_view.h"
#include "host_device.h"

namespace isoload {

constexpr int kSpillWays = 4, kSpillRounds = 3, kSpillFine = 1000;
constexpr int kLevelWays = 2, kLevelRounds = 5, kLevelFirst = 4, kLevelFine = 10000;
constexpr int kSpillProbes = 4;
constexpr int kSpillStates = kSpillWays + 2;  // two plans are kept while others are tried
constexpr int64_t kMillion = 1000000;

enum class SpillStatus : int32_t { ok = 0, negative = 1, too_many_copies = 2, none_alive = 3 };

struct SpillProblem : FillProblem {  // with empty spare slots; loads summed over sources here
  const int32_t* start;  // [P] copies per slot before anything is lent, or null: all in home slots
  int64_t capacity_ppm, threshold_ppm;  // of the mean; capacity 0 = search for the least cost
  bool per_expert;                      // the threshold is about experts, not about ranks
  int64_t tolerance_ppm;
  int32_t min_chunk, near_cost, far_cost, egress;
  bool within;  // experts do not leave their node
};

struct SpillResult {
  int32_t *slot_to_expert, *quota;  // [P]
  int64_t* level;                   // [1] the capacity, or the largest cost where that was searched
  int32_t* telemetry;  // [5] imports, most imports and exports of a rank, imports from other nodes, flags
};

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
