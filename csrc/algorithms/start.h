// start: where plan_exact begins. Augmenting changes no more than the peak demands, so the start chooses
// among the many optimal splits.
//   spread  every replicated expert evenly over its replicas: the sweeps make that a level load
//   local   copies stay on their source rank, else on its node, if the expert has a replica there
#pragma once

#include <cstdint>

#include "algorithms/replica_tables.h"
#include "host_device.h"
#include "team.h"

namespace isoload {

enum class Objective : int32_t { spread = 0, local = 1 };

// Adds all copies of the replicated experts to quota [P], which must be 0 for them, and to load [R].
template <class Team>
struct Start {
  Team& team;
  const ReplicaTables& t;
  const int32_t* total;  // [E] copies per expert
  int32_t *load, *quota;

  ISOLOAD_HD void spread() {
    auto deal_all = [&](int i, const auto& group) {
      const int e = t.order[i];
      deal(group, e, t.offsets[e], t.offsets[e + 1], total[e]);
    };
    team.for_each_by(
        t.num_split(), [&](int i) { return t.copies(t.order[i]) > kFew; },
        [&](int i) { deal_all(i, SerialTeam()); }, deal_all);
    team.sync();
  }

  // loads [R, E] per source rank.
  ISOLOAD_HD void local(const int32_t* loads, int R, int E, int per_node) {
    team.for_each(t.num_split(), [&](int i) {
      const int e = t.order[i], end = t.offsets[e + 1];
      int32_t far =
          0;  // copies from nodes without a replica; at last, behind all nodes, all replicas share them
      ISOLOAD_ROLLED
      for (int node = 0, j = t.offsets[e]; node <= R; node += per_node) {
        const int first = node < R ? j : t.offsets[e];  // replicas ascend by rank, so this node's are next
        int32_t near = node < R ? 0 : far;              // copies from ranks without a replica
        ISOLOAD_ROLLED
        for (int s = node; s < node + per_node && node < R; ++s) {
          const int32_t n = loads[int64_t(s) * E + e];
          if (j < end && t.ranks[j] == s)
            give(j++, n);
          else
            near += n;
        }
        if (j > first)
          deal(SerialTeam(), e, first, j, near);
        else
          far += near;
      }
    });
    team.sync();
  }

  // Equal parts of an expert's copies to replicas first .. last-1; experts take turns at who gets the
  // remainder.
  template <class Group>
  ISOLOAD_HD void deal(const Group& group, int e, int first, int last, int32_t copies) {
    const uint32_t c = last - first, taken = e % c, skipped = taken > 0 ? c - taken : 0;
    const uint32_t each = copies / c, more = copies % c;
    group.for_each(c, [&](int i) {
      const uint32_t turn = skipped + i < c ? skipped + i : skipped + i - c;
      give(first + i, each + (turn < more));
    });
  }

 private:
  static constexpr int kFew = 4;  // replicas that a lane deals to by itself

  ISOLOAD_HD void give(int j, int32_t copies) {
    quota[t.slots[j]] += copies;
    team.add(&load[t.ranks[j]], copies);
  }
};

}  // namespace isoload
