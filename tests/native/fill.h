// What the planners that fill spare slots ahead make of a spilling problem, and shard_tokens of an instance.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "algorithms/plan_replication.h"
#include "algorithms/shard_tokens.h"
#include "algorithms/top_up.h"
#include "instances.h"
#include "spill.h"

namespace isoload {

struct Fills {
  bool fits[2];  // whether plan_replication and top_up took the loads
  int32_t telemetry[2][5];
  std::vector<int32_t> slots[2];  // [P] after each
  ShardingStatus sharding;
  std::vector<int32_t> quota, home;  // [P], [E] of shard_tokens, in the instance's own slots

  void poison(const Instance& in, const Spilling& spill, int byte) {
    for (auto& buffer : slots) buffer.assign(in.R * spill.S, 0);
    quota.assign(in.P(), 0);
    for (auto* buffer : {&slots[0], &slots[1], &quota})
      std::memset(buffer->data(), byte, buffer->size() * sizeof(int32_t));
    std::memset(telemetry, byte, sizeof telemetry);
    home.assign(in.E, -1);
    for (int p = in.P() - 1; p >= 0; --p)
      if (const int e = in.slot_to_expert[p]; e >= 0) home[e] = p;
  }
  bool operator==(const Fills& other) const {
    for (int i = 0; i < 2; ++i) {
      if (fits[i] != other.fits[i]) return false;
      if (fits[i] &&
          (slots[i] != other.slots[i] || !std::equal(telemetry[i], telemetry[i] + 5, other.telemetry[i])))
        return false;
    }
    return sharding == other.sharding && (sharding != ShardingStatus::ok || quota == other.quota);
  }
};

// Nothing that was there has gone, no expert comes twice to a rank, dead ranks borrow nothing; copies add up.
inline const char* fills_error(const Instance& in, const Spilling& spill, const Fills& got) {
  for (int i = 0; i < 2 && got.fits[i]; ++i) {
    const auto& before = i ? got.slots[0] : spill.slot_to_expert;
    for (int p = 0; p < in.R * spill.S; ++p) {
      const int e = got.slots[i][p], r = p / spill.S;
      if (e == before[p]) continue;
      if (before[p] >= 0 || p % spill.S < spill.S - spill.spare) return "a fill changes what was there";
      if (!spill.alive.empty() && !spill.alive[r]) return "a dead rank borrows";
      const auto row = got.slots[i].begin() + r * spill.S;
      if (std::count(row, row + spill.S, e) > 1) return "a fill brings an expert twice";
    }
  }
  if (got.sharding != ShardingStatus::ok) return nullptr;
  std::vector<int64_t> taken(in.E);
  for (int p = 0; p < in.P(); ++p) {
    if (got.quota[p] < 0) return "sharding makes a quota negative";
    if (in.slot_to_expert[p] >= 0) taken[in.slot_to_expert[p]] += got.quota[p];
  }
  for (int e = 0; e < in.E; ++e)
    if (in.has_replica(e) && taken[e] != in.summed[e]) return "sharded quotas do not add up to the loads";
  return nullptr;
}

}  // namespace isoload
