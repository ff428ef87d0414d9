// spill_greedy: one try to bring every rank's cost down to a target by handing copies to other ranks.
//
// The busiest rank first, of its experts always the largest: the chunk goes to the rank that takes most of
// it, of several to the fullest, which keeps the roomy ranks for larger chunks. A rank's cost is its copies
// plus what its imports cost it. Givers end at the target or above and takers at the target or below, so no
// rank is both, and a rank is full after a chunk that its room cut short: it never gets an expert twice.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace isoload {

enum SpillFlag : int32_t { kBelowThreshold = 1, kNoSpareSlot = 2, kEgressLimit = 4, kImmovable = 8 };

// What all tries of one layer share.
struct SpillView {
  int R, S, per_node, spare;      // ranks, slots per rank, ranks per node, spare slots: the last of each rank
  const int32_t* slot_to_expert;  // [P] with the spare slots empty
  const int32_t* at_home;         // [P] an expert's copies in its home slot, 0 elsewhere
  const int32_t* load;            // [R] copies of plain EP
  const int32_t* order;           // [R] ranks, busiest first
  bool replicated;                // whether an expert has more than its home slot
  int64_t min_chunk, import_cost[2];  // in copies; of an expert from another node, from the own
  int32_t egress;                     // most exports of a rank

  ISOLOAD_HD int64_t least_import_cost() const {
    return import_cost[0] < import_cost[1] ? import_cost[0] : import_cost[1];
  }
  // The slot of an expert on a rank that holds it already, or -1.
  ISOLOAD_HD int held(int e, int r) const {
    if (!replicated) return -1;
    for (int p = r * S; p < r * S + S - spare; ++p)
      if (slot_to_expert[p] == e) return p;
    return -1;
  }
};

// Caller's memory of one try.
struct SpillState {
  int64_t* cost;            // [R]
  int32_t *free, *exports;  // [R] spare slots left; experts lent
  int32_t* takers;          // [R] ranks that may have room, ascending
  int32_t* quota;           // [P]
};

class SpillGreedy {
 public:
  // filled: [P] where borrowed experts are written, or null.
  ISOLOAD_HD SpillGreedy(const SpillView& view, const SpillState& state, int64_t target, int32_t* filled)
      : in_(view), to_(state), target_(target), filled_(filled) {}

  // free: [R] spare slots that may be filled. Returns the largest cost.
  ISOLOAD_HD int64_t run(const int32_t* free, int64_t slack) {
    for (int p = 0; p < in_.R * in_.S; ++p) to_.quota[p] = in_.at_home[p];
    for (int r = 0; r < in_.R; ++r) to_.cost[r] = in_.load[r], to_.free[r] = free[r], to_.exports[r] = 0;
    for (int r = 0; r < in_.R; ++r)
      if (may_take(r)) to_.takers[num_takers_++] = r;
    for (int i = 0; i < in_.R && in_.load[in_.order[i]] > target_; ++i) relieve(in_.order[i], slack);
    int64_t largest = 0;
    for (int r = 0; r < in_.R; ++r) largest = to_.cost[r] > largest ? to_.cost[r] : largest;
    return largest;
  }

  ISOLOAD_HD int32_t flags() const { return flags_; }
  ISOLOAD_HD int32_t across() const { return across_; }  // imports from another node

 private:
  struct Chunk {
    int64_t copies;
    int taker, slot;  // index into takers; slot in which it holds the expert, or -1
    bool near;
  };

  ISOLOAD_HD void relieve(int home, int64_t slack) {
    while (to_.cost[home] > target_) {
      const int64_t excess = to_.cost[home] - target_;
      int largest = home * in_.S;
      for (int p = largest + 1; p < home * in_.S + in_.S; ++p)
        if (to_.quota[p] > to_.quota[largest]) largest = p;
      if (to_.quota[largest] == 0) {  // what is left cannot move: shared experts
        flags_ |= kImmovable;
        return;
      }
      const int64_t here = to_.quota[largest];
      const Chunk chunk = choose(home, in_.slot_to_expert[largest], here < excess ? here : excess);
      if (chunk.copies < in_.min_chunk && excess <= slack) return;  // the tail stays at home
      if (chunk.copies == 0) {
        flags_ |= to_.exports[home] == in_.egress ? kEgressLimit : kNoSpareSlot;
        return;
      }
      give(home, largest, chunk);
    }
  }

  // The largest chunk near home, or a far one where the near one is small.
  ISOLOAD_HD Chunk choose(int home, int e, int64_t wanted) const {
    const bool lends = to_.exports[home] < in_.egress;
    const int first = home / in_.per_node * in_.per_node, last = first + in_.per_node;
    uint64_t best[2] = {0, 0};  // far, near: copies, then the taker's cost, which is below the target
    int chosen[2] = {0, 0};
    for (int i = 0; i < num_takers_; ++i) {
      const int r = to_.takers[i], near = r >= first && r < last;
      int64_t room = target_ - to_.cost[r];
      if (in_.held(e, r) < 0) room = lends && to_.free[r] > 0 ? room - in_.import_cost[near] : 0;
      const int64_t copies = room < wanted ? room : wanted;
      const uint64_t key = copies > 0 ? uint64_t(copies) << 32 | uint64_t(to_.cost[r]) : 0;
      if (key > best[near]) best[near] = key, chosen[near] = i;
    }
    const int64_t far_copies = best[0] >> 32, near_copies = best[1] >> 32;
    const bool near = near_copies >= (in_.min_chunk < far_copies ? in_.min_chunk : far_copies);
    const int64_t copies = near ? near_copies : far_copies;
    return {copies, chosen[near], copies ? in_.held(e, to_.takers[chosen[near]]) : -1, near};
  }

  ISOLOAD_HD void give(int home, int home_slot, const Chunk& chunk) {
    int slot = chunk.slot;
    const int r = to_.takers[chunk.taker];
    to_.cost[home] -= chunk.copies;
    to_.cost[r] += chunk.copies;
    if (slot < 0) {
      slot = r * in_.S + in_.S - to_.free[r];
      --to_.free[r], ++to_.exports[home];
      across_ += !chunk.near;
      to_.cost[r] += in_.import_cost[chunk.near];
      if (filled_) filled_[slot] = in_.slot_to_expert[home_slot];
    }
    to_.quota[home_slot] -= static_cast<int32_t>(chunk.copies);
    to_.quota[slot] += static_cast<int32_t>(chunk.copies);
    if (may_take(r)) return;
    for (int i = chunk.taker + 1; i < num_takers_; ++i) to_.takers[i - 1] = to_.takers[i];
    --num_takers_;
  }

  ISOLOAD_HD bool may_take(int r) const {
    const int64_t room = target_ - to_.cost[r];
    return in_.replicated ? room > 0 : to_.free[r] > 0 && room > in_.least_import_cost();
  }

  const SpillView& in_;
  const SpillState to_;
  const int64_t target_;
  int32_t* const filled_;
  int num_takers_ = 0;
  int32_t flags_ = 0, across_ = 0;
};

}  // namespace isoload
