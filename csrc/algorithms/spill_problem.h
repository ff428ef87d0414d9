// spill_problem: what plan_spill is given, what it returns, and its memory.
#pragma once

#include <cstdint>

#include "algorithms/spill_view.h"
#include "host_device.h"

namespace isoload {

constexpr int kSpillWays = 4, kSpillRounds = 3, kSpillFine = 1000;
constexpr int kLevelWays = 2, kLevelRounds = 5, kLevelFirst = 4, kLevelFine = 10000;
constexpr int kSpillProbes = 4;
constexpr int kSpillStates = kSpillWays + 2;  // two plans are kept while others are tried
constexpr int64_t kMillion = 1000000;

enum class SpillStatus : int32_t { ok = 0, negative = 1, too_many_copies = 2, none_alive = 3 };

struct SpillProblem {
  int R, E, S, per_node, spare;   // ranks, routed experts, slots per rank, ranks per node, spare slots
  const int32_t *loads, *fixed;   // [num_sources, E] copies; [R] copies that stay where they are, or null
  int num_sources;                //
  const int32_t* slot_to_expert;  // [P] with the spare slots empty
  const int32_t* home_slot;       // [E]
  const int32_t* start;           // [P] copies per slot before anything is lent, or null: all in home slots
  const bool* alive;              // [R] or null
  int64_t capacity_ppm, threshold_ppm;  // of the mean; capacity 0 = search for the least cost
  bool per_expert;                      // the threshold is about experts, not about ranks
  int64_t tolerance_ppm, min_chunk, near_cost, far_cost;
  int32_t egress;
  bool within;  // experts do not leave their node
};

struct SpillResult {
  int32_t *slot_to_expert, *quota;  // [P]
  int64_t* level;                   // [1] the capacity, or the largest cost where that was searched
  int32_t* telemetry;  // [5] imports, most imports and exports of a rank, imports from other nodes, flags
};

// Where the copies are before anything is lent.
struct SpillStart {
  int32_t *copies, *load, *order;  // [P]; [R]; [R] ranks, busiest first
};

// Caller's memory; every array is written before it is read.
struct SpillWorkspace {
  int64_t R, P;
  int64_t *reached, *above;         // [kSpillStates] cost of each try; copies above its level
  int64_t* room;                    // [kSpillProbes] at levels that are looked at together
  int32_t *tries, *flags;           // of all states; [kSpillStates] of each try
  int32_t *total, *free, *node;     // [E]; [R]; [R] of each rank
  int32_t* starts;                  // of both starts
  int32_t *rank, *queue;            // [P] of each slot; [P] slots whose copies may be lent
  int32_t *index, *slots, *copies;  // [P] to find them

  // As the caller says, or with all copies in their home slots.
  ISOLOAD_HD SpillStart start(bool home) const {
    int32_t* const copies = starts + home * (P + 2 * R);
    return {copies, copies + P, copies + P + R};
  }
  ISOLOAD_HD SpillState state(int k) const {
    int32_t* next = tries + k * (7 * R + 3 * P);
    auto take = [&](int64_t n) { return next += n, next - n; };
    return {take(R), take(R), take(R), take(4 * R), take(P), take(P), take(P)};
  }
  ISOLOAD_HD static int64_t bytes(int64_t R, int64_t E, int64_t P) {
    return 8 * (2 * kSpillStates + kSpillProbes) +
           4 * (kSpillStates * (7 * R + 3 * P + 1) + E + 6 * R + 7 * P);
  }
  ISOLOAD_HD static SpillWorkspace at(void* memory, int64_t R, int64_t E, int64_t P) {
    SpillWorkspace ws;
    ws.R = R, ws.P = P;
    ws.reached = static_cast<int64_t*>(memory);
    ws.above = ws.reached + kSpillStates;
    ws.room = ws.above + kSpillStates;
    int32_t* next = reinterpret_cast<int32_t*>(ws.room + kSpillProbes);
    auto take = [&](int64_t n) { return next += n, next - n; };
    ws.tries = take(kSpillStates * (7 * R + 3 * P));
    ws.flags = take(kSpillStates), ws.total = take(E), ws.free = take(R);
    ws.node = take(R), ws.starts = take(2 * (P + 2 * R));
    ws.rank = take(P), ws.queue = take(P), ws.index = take(P), ws.slots = take(P), ws.copies = take(P);
    return ws;
  }
};

}  // namespace isoload
