// route_shared_sampled on one core: slots [T, K] to ranks [T]. Returns the first slot outside
// [-1, R * slots_per_rank), or -1.
#pragma once

#include <vector>

#include "cpu/cpu.h"

namespace isoload::cpu {

template <class Id>
int64_t route_shared_sampled(const Id* slots, int64_t T, int K, const SharedDraw& in, int32_t* ranks) {
  const int64_t P = int64_t(in.R) * in.slots_per_rank;
  std::vector<int64_t> memory(2 * in.R);
  SerialTeam team;
  const SharedSlack slack = find_slack(team, in, K, memory.data());
  for (int64_t i = 0; i < T; ++i, slots += K) {
    RankSet<kMaxRanks / 64> visited;
    for (int k = 0; k < K; ++k) {
      const int64_t slot = slots[k];
      if (slot < -1 || slot >= P) return slot;
      if (slot >= 0) visited.insert(static_cast<int>(slot) / in.slots_per_rank);
    }
    ranks[i] = draw_shared(in, slack, T, i, visited, slots, K);
  }
  return -1;
}

}  // namespace isoload::cpu
