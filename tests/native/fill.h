// What the planners that fill spare slots ahead make of a problem of plan_fill, and shard_tokens of an
// instance.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "algorithms/plan_replication.h"
#include "algorithms/shard_tokens.h"
#include "algorithms/top_up.h"
#include "filling.h"
#include "instances.h"

namespace isoload {

struct Fills {
  bool fits[2];  // whether plan_replication and top_up took the loads
  int32_t telemetry[2][5];
  std::vector<int32_t> slots[2];  // [P] after each
  ShardingStatus sharding;
  std::vector<int32_t> quota, home;  // [P], [E] of shard_tokens, in the instance's own slots

  void poison(const Instance& in, const Filling& filling, int byte) {
    for (auto& buffer : slots) buffer.assign(in.R * filling.S, 0);
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
inline const char* fills_error(const Instance& in, const Filling& filling, const Fills& got) {
  for (int i = 0; i < 2 && got.fits[i]; ++i) {
    const auto& before = i ? got.slots[0] : filling.slot_to_expert;
    for (int p = 0; p < in.R * filling.S; ++p) {
      const int e = got.slots[i][p], r = p / filling.S;
      if (e == before[p]) continue;
      if (before[p] >= 0 || p % filling.S < filling.S - filling.spare) return "a fill changes what was there";
      if (!filling.alive.empty() && !filling.alive[r]) return "a dead rank borrows";
      const auto row = got.slots[i].begin() + r * filling.S;
      if (std::count(row, row + filling.S, e) > 1) return "a fill brings an expert twice";
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
