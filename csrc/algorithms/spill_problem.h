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
struct SpillStart {
  int32_t *copies, *load, *order;  // [P]; [R]; [R] ranks, busiest first
};

// Of n numbers. Arrays start aligned, and nvcc keeps the address of each: the sum of such sizes is no index
// that it could add to that of an access.
ISOLOAD_HD inline int64_t aligned_bytes(int64_t n) {
  return (n * int64_t(sizeof(int32_t)) + 15) & ~int64_t(15);
}

// The next n numbers of a workspace.
ISOLOAD_HD inline int32_t* take(char*& next, int64_t n) {
  char* const taken = next;
  next += aligned_bytes(n);
  return reinterpret_cast<int32_t*>(taken);
}

// Caller's memory; every array is written before it is read.
struct SpillWorkspace {
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
    char* at = starts + home * bytes_of_start(R, P);
    return {take(at, P), take(at, R), take(at, R)};
  }
  ISOLOAD_HD SpillState state(int k) const {
    char* at = tries + k * bytes_of_state(R, P);
    return {take(at, R), take(at, R), take(at, R), take(at, 4 * R), take(at, P), take(at, P), take(at, P)};
  }
  ISOLOAD_HD static int64_t bytes(int64_t R, int64_t E, int64_t P) {
    return 8 * kSpillProbes + 3 * aligned_bytes(kSpillStates) + kSpillStates * bytes_of_state(R, P) +
           aligned_bytes(E) + 2 * aligned_bytes(R) + 2 * bytes_of_start(R, P) + 5 * aligned_bytes(P);
  }
  ISOLOAD_HD static SpillWorkspace at(void* memory, int64_t R, int64_t E, int64_t P) {
    SpillWorkspace ws;
    ws.R = R, ws.P = P;
    ws.room = static_cast<int64_t*>(memory);
    char* next = reinterpret_cast<char*>(ws.room + kSpillProbes);
    ws.reached = take(next, kSpillStates), ws.above = take(next, kSpillStates);
    ws.flags = take(next, kSpillStates);
    ws.total = take(next, E), ws.free = take(next, R), ws.node = take(next, R);
    ws.rank = take(next, P), ws.queue = take(next, P);
    ws.index = take(next, P), ws.slots = take(next, P), ws.copies = take(next, P);
    ws.starts = next, ws.tries = next + 2 * bytes_of_start(R, P);
    return ws;
  }

 private:
  ISOLOAD_HD static int64_t bytes_of_start(int64_t R, int64_t P) {
    return aligned_bytes(P) + 2 * aligned_bytes(R);
  }
  ISOLOAD_HD static int64_t bytes_of_state(int64_t R, int64_t P) {
    return 3 * aligned_bytes(R) + aligned_bytes(4 * R) + 3 * aligned_bytes(P);
  }
};

}  // namespace isoload
