// One layer of EPLB's global policy: tests/reference/place_eplb.py computes the same slots.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "placers/layout.h"

namespace isoload::placers {

// Ranks of one layer while they are filled. Float32 throughout, because the published code is.
class EplbLayer {
 public:
  EplbLayer(const float* load, int experts, const int32_t* capacity, int ranks, int width, bool dedup)
      : load_(load),
        experts_(experts),
        capacity_(capacity),
        ranks_(ranks),
        width_(width),
        dedup_(dedup),
        filled_(ranks),
        weight_(ranks),
        holds_(static_cast<size_t>(ranks) * experts) {}

  // slots [R, width], filled with -1 before.
  void place(int32_t* slots) {
    slots_ = slots;
    const int num_slots = std::accumulate(capacity_, capacity_ + ranks_, 0);
    replicate(num_slots);
    if (width_ == 1 && num_slots == ranks_) {  // nothing to pack; the published order
      std::copy(replicas_.begin(), replicas_.end(), slots);
      return;
    }
    std::stable_sort(replicas_.begin(), replicas_.end(),
                     [this](int a, int b) { return part_[a] > part_[b]; });
    for (const int expert : replicas_) {
      int rank = lightest(expert);
      if (rank < 0) rank = make_room(expert);
      put(rank, expert);
    }
  }

 private:
  static constexpr float kNone = std::numeric_limits<float>::infinity();

  // One replica each, then one more for the expert whose replicas are heaviest (ties: lowest id).
  void replicate(int num_slots) {
    const int most = dedup_ ? open_ranks(capacity_, ranks_) : num_slots;
    part_.assign(load_, load_ + experts_);
    replicas_.resize(experts_);
    std::iota(replicas_.begin(), replicas_.end(), 0);
    std::vector<int> copies(experts_, 1);
    while (static_cast<int>(replicas_.size()) < num_slots) {
      const int expert = static_cast<int>(std::max_element(part_.begin(), part_.end()) - part_.begin());
      const int n = ++copies[expert];
      replicas_.push_back(expert);
      part_[expert] = n < most ? load_[expert] / n : -1;  // -1: may not get more
    }
    for (int e = 0; e < experts_; ++e) part_[e] = load_[e] / copies[e];
  }

  bool held(int rank, int expert) const { return holds_[static_cast<size_t>(rank) * experts_ + expert]; }
  bool has_room(int rank) const { return filled_[rank] < capacity_[rank]; }

  // The rank with the least load that has room (ties: lowest); -1 if none has.
  int lightest(int expert) const {
    int best = -1;
    for (int r = 0; r < ranks_; ++r) {
      if (!has_room(r) || (dedup_ && held(r, expert))) continue;
      if (best < 0 || weight_[r] < weight_[best]) best = r;
    }
    return best;
  }

  void put(int rank, int expert) {
    slots_[rank * width_ + filled_[rank]++] = expert;
    weight_[rank] += part_[expert];
    holds_[static_cast<size_t>(rank) * experts_ + expert] = true;
  }

  // Every rank with room holds the expert: moves one replica from a full rank to one with room, so that the
  // heavier of the two is lightest (ties: lowest giving rank, its first slot, lowest taking rank). Returns
  // the giving rank.
  int make_room(int expert) {
    float least = kNone;
    int from = -1, place = 0, to = 0;
    for (int giver = 0; giver < ranks_; ++giver) {
      if (held(giver, expert)) continue;
      for (int s = 0; s < filled_[giver]; ++s) {
        const int other = slots_[giver * width_ + s];
        const float gives = weight_[giver] - part_[other] + part_[expert];
        for (int taker = 0; taker < ranks_; ++taker) {
          if (!has_room(taker) || held(taker, other)) continue;
          const float heavier = std::max(gives, weight_[taker] + part_[other]);
          if (heavier < least) least = heavier, from = giver, place = s, to = taker;
        }
      }
    }
    if (from < 0) {
      throw std::invalid_argument(
          "capacity must leave room for every replica on a rank without one of its expert");
    }
    int32_t* row = slots_ + from * width_;
    const int other = row[place];
    put(to, other);
    std::copy(row + place + 1, row + filled_[from], row + place);
    row[--filled_[from]] = -1;
    weight_[from] += -part_[other];
    holds_[static_cast<size_t>(from) * experts_ + other] = false;
    return from;
  }

  const float* load_;
  int experts_;
  const int32_t* capacity_;
  int ranks_, width_;
  bool dedup_;
  int32_t* slots_ = nullptr;
  std::vector<int> filled_, replicas_;
  std::vector<float> weight_, part_;  // load per rank; load of one replica of each expert
  std::vector<uint8_t> holds_;        // [R, E]
};

}  // namespace isoload::placers
