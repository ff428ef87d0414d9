// fill_problem: the input of plan_fill, its rules, and its memory.
#pragma once

#include <cstdint>

#include "algorithms/spare_fill.h"
#include "host_device.h"
#include "workspace.h"

namespace isoload {

constexpr int kFillLevels = 6, kFillFine = 10000;
constexpr int64_t kMillion = 1000000;

enum FillFlag : int32_t { kBelowThreshold = 1, kAboveCapacity = 2 };

struct LevelFillProblem : FillProblem {  // with empty spare slots
  const int32_t* start;                  // [P] copies per slot before any import, or null: all in home slots
  int64_t capacity_ppm, threshold_ppm;   // of the mean load
  bool per_expert;                       // the threshold is about experts, not about ranks
  int32_t min_chunk;                     // a rank that is above a level by less lends nothing, at least 1
  int32_t near_import, far_import;       // what an import costs its rank, in copies, at most 2^30
  int32_t near_export, far_export;       // what it costs the rank of the home slot
};

struct LevelFillWorkspace : Workspace<LevelFillWorkspace> {
  int32_t *total, *owner;             // [E] copies; rank of the home slot, or -1
  int32_t *first_load, *load, *free;  // [R] before any import; of this level; spare slots left
  int32_t* room;                      // [R] below the level, of ranks with a free spare slot; or -1
  int32_t *imported, *exported;       // [R] what the imports and exports of this level cost
  int32_t *copies, *of_level, *rank,
      *queue;                      // [P] before any import; of this level; of each slot; see FillQueue
  int32_t *index, *slots, *rests;  // [P] to sort the queue; slots that a level has cut
  int32_t *lent, *best;            // [R * spare] experts of this level, of the best one; or -1
  int32_t* flags;                  // [1]
  char* holds;                     // [E, R] whether the rank has a slot of it; only with replicas

  template <class Take>
  ISOLOAD_HD void lay_out(int64_t R, int64_t E, int64_t P, int64_t spare, Take&& take) {
    take(InPacks{E}, total, owner);
    take(InPacks{R}, first_load, load, free, room, imported, exported);
    take(InPacks{P}, copies, of_level, rank, queue, index, slots, rests);
    take(InPacks{R * spare}, lent, best);
    take(InPacks{1}, flags);
    take(InPacks{E * R}, holds);
  }
};

// What all levels of one layer share.
struct FillQueue {
  int n;  // slots of the ranks that are above the lowest level, most copies first, then the lowest
  int32_t low, busiest;  // the lowest level; the largest load before any import
  bool replicated;       // whether an expert has more than its home slot
};

}  // namespace isoload
