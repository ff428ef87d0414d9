// A spilling problem beside every instance, what plan_spill makes of it, and what is wrong with that.
#pragma once

#include <algorithm>
#include <climits>
#include <cstring>
#include <vector>

#include "algorithms/plan_spill.h"
#include "instances.h"

namespace isoload {

struct Spilling {
  int S, spare;                                    // slots per rank with the spare ones
  std::vector<int32_t> slot_to_expert, home_slot;  // [P]; [E], -1 for an expert without a slot
  std::vector<char> alive;                         // [R] or empty
  int64_t capacity_ppm, threshold_ppm, tolerance_ppm;
  int32_t min_chunk, near_cost, far_cost;
  int32_t egress;
  bool per_expert, within;
  std::vector<int32_t> start;  // [P] or empty
};

inline constexpr int kMostSpare = 3;

// A start that puts every expert's copies into any of its slots, in two parts.
inline void deal_copies(const Instance& in, Spilling& spill, Rng& rng) {
  spill.start.assign(in.R * spill.S, 0);
  for (int e = 0; e < in.E; ++e) {
    std::vector<int> slots;
    for (int p = 0; p < in.R * spill.S; ++p)
      if (spill.slot_to_expert[p] == e) slots.push_back(p);
    if (slots.empty() || in.summed[e] < 0 || in.summed[e] > INT_MAX) continue;
    const auto half = static_cast<int32_t>(in.summed[e] / 2);
    const int count = static_cast<int>(slots.size());
    spill.start[slots[rng.below(count)]] += half;
    spill.start[slots[rng.below(count)]] += static_cast<int32_t>(in.summed[e]) - half;
  }
}

inline Spilling draw_spilling(const Instance& in, uint64_t seed) {
  Rng rng(seed ^ 0x3c6ef372);
  Spilling spill;
  spill.spare = rng.below(kMostSpare + 1);
  spill.S = in.S + spill.spare;
  spill.slot_to_expert.assign(in.R * spill.S, -1);
  spill.home_slot.assign(in.E, -1);
  const bool replicas = rng.one_in(2);
  for (int r = 0; r < in.R; ++r)
    for (int s = 0; s < in.S; ++s) {
      const int e = in.slot_to_expert[r * in.S + s], p = r * spill.S + s;
      if (e < 0 || (spill.home_slot[e] >= 0 && !replicas)) continue;
      spill.slot_to_expert[p] = e;
      if (spill.home_slot[e] < 0) spill.home_slot[e] = p;
    }
  spill.capacity_ppm = rng.one_in(2) ? 0 : kMillion + rng.below(200000);
  spill.threshold_ppm = rng.one_in(3) ? 1300000 : 0;
  spill.tolerance_ppm = rng.one_in(2) ? 0 : 50000;
  spill.min_chunk = rng.one_in(2) ? 1 : 1 + rng.below(64);
  spill.near_cost = rng.below(1 << rng.below(12));
  spill.far_cost = spill.near_cost + rng.below(1 << rng.below(12));
  spill.egress = rng.one_in(3) ? rng.below(4) : INT_MAX;
  spill.per_expert = rng.one_in(4);
  spill.within = rng.one_in(3);
  if (rng.one_in(2)) deal_copies(in, spill, rng);
  if (rng.one_in(4))
    for (int r = 0; r < in.R; ++r) {
      const auto first = spill.slot_to_expert.begin() + r * spill.S;
      spill.alive.push_back(r == 0 || std::any_of(first, first + spill.S, [](int e) { return e >= 0; }));
    }
  return spill;
}

struct Spilled {
  SpillStatus status;
  int64_t level;
  int32_t telemetry[5];
  std::vector<int32_t> slot_to_expert, quota;

  void poison(const Instance& in, const Spilling& spill, int byte) {
    for (auto* buffer : {&slot_to_expert, &quota}) {
      buffer->assign(in.R * spill.S, 0);
      std::memset(buffer->data(), byte, buffer->size() * sizeof(int32_t));
    }
    std::memset(telemetry, byte, sizeof telemetry);
  }
  bool operator==(const Spilled& other) const {
    return status == other.status &&
           (status != SpillStatus::ok ||
            (level == other.level && slot_to_expert == other.slot_to_expert && quota == other.quota &&
             std::equal(telemetry, telemetry + 5, other.telemetry)));
  }
};

// Conservation, no expert twice on a rank, nothing outside the spare slots, no load above the start's.
inline const char* spilled_error(const Instance& in, const Spilling& spill, const Spilled& got) {
  if (got.status != SpillStatus::ok) return nullptr;
  std::vector<int64_t> load(in.R), plain(in.R), taken(in.E);
  for (int r = 0; r < in.R; ++r) load[r] = plain[r] = in.fixed.empty() ? 0 : in.fixed[r];
  for (int p = 0; p < in.R * spill.S; ++p) {
    const int e = got.slot_to_expert[p], before = spill.slot_to_expert[p], s = p % spill.S;
    if (s < spill.S - spill.spare && e != before) return "a resident slot has changed";
    if (got.quota[p] < 0 || (e < 0 && got.quota[p] != 0)) return "a quota is negative or in an empty slot";
    if (e < 0) continue;
    const auto row = got.slot_to_expert.begin() + p / spill.S * spill.S;
    if (before < 0 && std::count(row, row + spill.S, e) > 1) return "an expert is borrowed where it is";
    if (before < 0 && got.quota[p] == 0) return "an expert is borrowed for nothing";
    load[p / spill.S] += got.quota[p];
    taken[e] += got.quota[p];
    if (!spill.start.empty())
      plain[p / spill.S] += spill.start[p];
    else if (spill.home_slot[e] == p)
      plain[p / spill.S] += in.summed[e];
  }
  for (int e = 0; e < in.E; ++e)
    if (spill.home_slot[e] >= 0 && taken[e] != in.summed[e]) return "quotas do not add up to the loads";
  const auto most = *std::max_element(plain.begin(), plain.end());
  return *std::max_element(load.begin(), load.end()) > most ? "a rank passes the start" : nullptr;
}

}  // namespace isoload
