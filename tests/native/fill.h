// What top_up makes of the slots that plan_fill filled.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "algorithms/top_up.h"
#include "filling.h"
#include "instances.h"

namespace isoload {

struct ToppedUp {
  bool fits;  // whether it took the loads
  int32_t telemetry[5];
  std::vector<int32_t> slots;  // [P]

  void poison(const Instance& in, const Filling& filling, int byte) {
    slots.assign(in.R * filling.S, 0);
    std::memset(slots.data(), byte, slots.size() * sizeof(int32_t));
    std::memset(telemetry, byte, sizeof telemetry);
  }
  bool operator==(const ToppedUp& other) const {
    return fits == other.fits &&
           (!fits || (slots == other.slots && std::equal(telemetry, telemetry + 5, other.telemetry)));
  }
};

// Nothing that was there has gone, no expert comes twice to a rank, dead ranks borrow nothing.
inline const char* topped_up_error(const Instance& in, const Filling& filling, const Filled& begun,
                                   const ToppedUp& got) {
  const auto& before = begun.fits ? begun.slot_to_expert : filling.slot_to_expert;
  for (int p = 0; p < in.R * filling.S && got.fits; ++p) {
    const int e = got.slots[p], r = p / filling.S;
    if (e == before[p]) continue;
    if (before[p] >= 0 || p % filling.S < filling.S - filling.spare) return "a fill changes what was there";
    if (!filling.alive.empty() && !filling.alive[r]) return "a dead rank borrows";
    const auto row = got.slots.begin() + r * filling.S;
    if (std::count(row, row + filling.S, e) > 1) return "a fill brings an expert twice";
  }
  return nullptr;
}

}  // namespace isoload
