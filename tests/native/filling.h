// A problem of plan_fill beside every instance, what plan_fill makes of it, and what is wrong with that.
#pragma once

#include <algorithm>
#include <climits>
#include <cstring>
#include <vector>

#include "algorithms/plan_fill.h"
#include "instances.h"

namespace isoload {

struct Filling {
  int S, spare;                                    // slots per rank with the spare ones
  std::vector<int32_t> slot_to_expert, home_slot;  // [P]; [E], -1 for an expert without a slot
  std::vector<char> alive;                         // [R] or empty
  int64_t capacity_ppm, threshold_ppm;
  int32_t min_chunk, near_import, far_import, near_export, far_export;
  bool per_expert, within;
  std::vector<int32_t> start;  // [P] or empty
};

inline constexpr int kMostSpare = 3;

// A start that puts every expert's copies into any of its slots, in two parts.
inline void deal_copies(const Instance& in, Filling& fill, Rng& rng) {
  fill.start.assign(in.R * fill.S, 0);
  for (int e = 0; e < in.E; ++e) {
    std::vector<int> slots;
    for (int p = 0; p < in.R * fill.S; ++p)
      if (fill.slot_to_expert[p] == e) slots.push_back(p);
    if (slots.empty() || in.summed[e] < 0 || in.summed[e] > INT_MAX) continue;
    const auto half = static_cast<int32_t>(in.summed[e] / 2);
    const int count = static_cast<int>(slots.size());
    fill.start[slots[rng.below(count)]] += half;
    fill.start[slots[rng.below(count)]] += static_cast<int32_t>(in.summed[e]) - half;
  }
}

inline Filling draw_filling(const Instance& in, uint64_t seed) {
  Rng rng(seed ^ 0x3c6ef372);
  Filling fill;
  fill.spare = rng.below(kMostSpare + 1);
  fill.S = in.S + fill.spare;
  fill.slot_to_expert.assign(in.R * fill.S, -1);
  fill.home_slot.assign(in.E, -1);
  const bool replicas = rng.one_in(2);
  for (int r = 0; r < in.R; ++r)
    for (int s = 0; s < in.S; ++s) {
      const int e = in.slot_to_expert[r * in.S + s], p = r * fill.S + s;
      if (e < 0 || (fill.home_slot[e] >= 0 && !replicas)) continue;
      fill.slot_to_expert[p] = e;
      if (fill.home_slot[e] < 0) fill.home_slot[e] = p;
    }
  fill.capacity_ppm = kMillion + (rng.one_in(2) ? 0 : rng.below(200000));
  fill.threshold_ppm = rng.one_in(3) ? 1300000 : 0;
  fill.min_chunk = rng.one_in(2) ? 1 : 1 + rng.below(64);
  const bool priced = rng.one_in(2);
  fill.near_import = priced ? rng.below(1 << rng.below(12)) : 0;
  fill.far_import = priced ? fill.near_import + rng.below(1 << rng.below(12)) : 0;
  fill.near_export = priced ? rng.below(1 << rng.below(12)) : 0;
  fill.far_export = priced ? fill.near_export + rng.below(1 << rng.below(12)) : 0;
  fill.per_expert = rng.one_in(4);
  fill.within = rng.one_in(3);
  if (rng.one_in(2)) deal_copies(in, fill, rng);
  if (rng.one_in(4))
    for (int r = 0; r < in.R; ++r) {
      const auto first = fill.slot_to_expert.begin() + r * fill.S;
      fill.alive.push_back(r == 0 || std::any_of(first, first + fill.S, [](int e) { return e >= 0; }));
    }
  return fill;
}

struct Filled {
  bool fits;  // whether plan_fill took the loads
  int32_t telemetry[5];
  std::vector<int32_t> slot_to_expert;

  void poison(const Instance& in, const Filling& fill, int byte) {
    slot_to_expert.assign(in.R * fill.S, 0);
    std::memset(slot_to_expert.data(), byte, slot_to_expert.size() * sizeof(int32_t));
    std::memset(telemetry, byte, sizeof telemetry);
  }
  bool operator==(const Filled& other) const {
    return fits == other.fits && (!fits || (slot_to_expert == other.slot_to_expert &&
                                            std::equal(telemetry, telemetry + 5, other.telemetry)));
  }
};

// No expert twice on a rank, nothing outside the spare slots, no expert out of its node, dead ranks borrow
// nothing.
inline const char* filled_error(const Instance& in, const Filling& fill, const Filled& got) {
  if (!got.fits) return nullptr;
  int imports = 0;
  for (int p = 0; p < in.R * fill.S; ++p) {
    const int e = got.slot_to_expert[p], before = fill.slot_to_expert[p], s = p % fill.S, r = p / fill.S;
    if (s < fill.S - fill.spare && e != before) return "a resident slot has changed";
    if (e < 0 || before >= 0) continue;
    ++imports;
    if (!fill.alive.empty() && !fill.alive[r]) return "a dead rank borrows";
    const auto row = got.slot_to_expert.begin() + r * fill.S;
    if (std::count(row, row + fill.S, e) > 1) return "an expert is borrowed where it is";
    if (fill.within && fill.home_slot[e] / fill.S / in.ranks_per_node != r / in.ranks_per_node)
      return "an expert left its node";
  }
  if (imports != got.telemetry[0]) return "the imports are miscounted";
  return (got.telemetry[4] & kBelowThreshold) && imports ? "experts move below the threshold" : nullptr;
}

}  // namespace isoload
