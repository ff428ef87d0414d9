// Hands out each expert's share in slot order, on the CPU.
#pragma once

#include <cstdint>
#include <vector>

#include "algorithms/replica_tables.h"

namespace isoload::cpu {

template <class Id>
bool is_expert(Id id, int E) {
  return static_cast<uint64_t>(id) < static_cast<uint64_t>(E);
}

// The i-th copy of an expert goes to the first replica whose cumulative share exceeds i.
class Dealer {
 public:
  void reset(const ReplicaTables& tables, int E, const int32_t* share) {
    t_ = tables, share_ = share;
    hands_.resize(E);
    for (int e = 0; e < E; ++e) {
      hands_[e].next = t_.offsets[e];
      advance(e);
    }
  }
  int deal(int e) {  // -1: the share is used up
    const int p = hands_[e].slot;
    if (p >= 0 && --hands_[e].left == 0) advance(e);
    return p;
  }
  int undealt() const {  // an expert with copies to spare, or -1
    for (std::size_t e = 0; e < hands_.size(); ++e)
      if (hands_[e].slot >= 0) return static_cast<int>(e);
    return -1;
  }

 private:
  struct Hand {
    int32_t slot, left, next;  // replica now served, copies it still takes, index of its successor
  };
  void advance(int e) {
    Hand& hand = hands_[e];
    hand.slot = -1;
    while (hand.next < t_.offsets[e + 1] && hand.slot < 0) {
      const int p = t_.slots[hand.next++];
      if (share_[p] > 0) hand.slot = p, hand.left = share_[p];
    }
  }
  ReplicaTables t_;
  const int32_t* share_ = nullptr;
  std::vector<Hand> hands_;
};

}  // namespace isoload::cpu
