// From ids to slots on one core: the copies are counted, the caller splits the counts, the copies are dealt.
//
// The i-th copy of an expert goes to the first replica whose cumulative share exceeds i, as in Dealer. Here
// the shares are of these very counts, so nothing can run out, and only where a replica ends does a copy
// change what the next one finds. The ids are taken in blocks; one in which no replica ends is looked up and
// no more.
#pragma once

#include <cstdint>
#include <vector>

#include "algorithms/replica_tables.h"

namespace isoload::cpu {

class CountedDeal {
 public:
  CountedDeal(const ReplicaTables& tables, int E) : t_(tables), E_(E), split_(tables.num_split()) {
    thread_local Memory kept;  // from call to call
    kept.hands.resize(E + 1), kept.upto.resize(split_);
    memory_ = &kept, hands_ = kept.hands.data(), upto_ = kept.upto.data();
  }

  // counts [E] of ids [n]. Returns the first id outside [-1, E), or -1.
  template <class Id>
  int64_t count(const Id* ids, int64_t n, int32_t* counts) {
    for (int e = 0; e < E_; ++e) counts[e] = 0;
    block_ = 8 * split_ > kLeastBlock ? 8 * split_ : kLeastBlock;  // its marks cost less than its copies
    memory_->marks.resize(((n + block_ - 1) / block_ + 1) * split_);
    uint32_t* mark = memory_->marks.data();
    for (int i = 0; i < split_; ++i) *mark++ = 0;
    const uint64_t E = E_;
    for (int64_t begin = 0; begin < n; begin += block_) {
      const int64_t end = end_of(begin, n);
      for (int64_t i = begin; i < end; ++i) {
        const Id id = ids[i];
        if (static_cast<uint64_t>(id) < E)
          ++counts[id];
        else if (id != -1)
          return id;
      }
      for (int i = 0; i < split_; ++i) *mark++ = counts[t_.order[i]];
    }
    return -1;
  }

  // slots [n] of the ids that were counted; share [P] of their counts.
  template <class Id>
  void deal(const Id* ids, int64_t n, const int32_t* share, Id* slots) {
    share_ = share;
    take_hands();
    const uint32_t* mark = memory_->marks.data();
    Hand* const hands = hands_ + 1;
    for (int64_t begin = 0; begin < n; begin += block_, mark += split_) {
      const int64_t end = end_of(begin, n);
      bool ends = false;
      for (int i = 0; i < split_; ++i) ends |= mark[split_ + i] >= upto_[i];
      if (!ends) {
        for (int64_t i = begin; i < end; ++i) slots[i] = hands[ids[i]].slot;
        continue;
      }
      for (int i = 0; i < split_; ++i) hand(t_.order[i]).left = upto_[i] - mark[i];
      for (int64_t i = begin; i < end; ++i) {
        Hand& here = hands[ids[i]];
        slots[i] = here.slot;
        if (--here.left == 0) pass(static_cast<int>(ids[i]));
      }
      for (int i = 0; i < split_; ++i) upto_[i] = hand(t_.order[i]).left + mark[split_ + i];
    }
  }

 private:
  static constexpr int64_t kLeastBlock = 256;
  static constexpr uint32_t kEndless = uint32_t(1) << 31;  // more than there are copies

  // The replica that takes the next copy, and how many it still takes; of a last one with a share kEndless.
  struct Hand {
    int32_t slot;
    uint32_t left;
  };
  struct Memory {
    std::vector<uint32_t> marks, upto;
    std::vector<Hand> hands;
  };

  int64_t end_of(int64_t begin, int64_t n) const { return begin + block_ < n ? begin + block_ : n; }
  Hand& hand(int e) { return hands_[e + 1]; }

  // That of -1, those of experts with one replica at most, and the first of the others.
  void take_hands() {
    hands_[0] = {-1, kEndless};
    for (int e = 0; e < E_; ++e) hand(e) = {t_.copies(e) > 0 ? t_.slots[t_.offsets[e]] : -1, kEndless};
    for (int i = 0; i < split_; ++i) {
      const int e = t_.order[i];
      take(e, t_.offsets[e]);
      upto_[i] = hand(e).left;
    }
  }

  // The hand of e is its first replica with a share from the j-th on, if there is one.
  void take(int e, int j) {
    const int end = t_.offsets[e + 1];
    while (j < end && share_[t_.slots[j]] == 0) ++j;
    if (j == end) return;
    int next = j + 1;
    while (next < end && share_[t_.slots[next]] == 0) ++next;
    hand(e) = {t_.slots[j], next < end ? static_cast<uint32_t>(share_[t_.slots[j]]) : kEndless};
  }

  // On to the next replica of e.
  void pass(int e) {
    int j = t_.offsets[e];
    while (t_.slots[j] != hand(e).slot) ++j;
    take(e, j + 1);
  }

  const ReplicaTables t_;
  const int E_, split_;  // experts, those of them with several replicas
  int64_t block_ = 0;
  const int32_t* share_ = nullptr;
  Memory* memory_;  // marks [blocks + 1, split]: copies of each up to a block
  uint32_t* upto_;  // [split] copies of each up to the end of the replica in hand
  Hand* hands_;     // [E + 1], that of -1 first
};

}  // namespace isoload::cpu
