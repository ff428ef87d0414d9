// share_alone: one source rank's part of a quota when it knows the sums over all ranks, but no other rank's
// counts: the collective was an all-reduce, not a gather; or the quota is of batches before (`past`).
//
// Source s cuts its own n copies of expert e where the quotas cut the expert's `total`: cut c lies at
//   floor(n * (quota_1 + .. + quota_c) / total + u),   u = frac(1/2 + s / golden ratio + 0.37 e) in [0, 1)
// The first cut is 0 and the last n, so a source sends exactly its copies. The offset u spreads the sources'
// roundings evenly, so that they nearly cancel. Any u < 1 moves a slot's part of one source by less than one
// copy, and by nothing if that source has all of the expert's copies: over all sources slot p receives within
// max(0, sources with copies of e - 1) of quota[p]. u is 32-bit fixed point: the same bits everywhere.
//
// Past quotas only say proportions: this batch may have more copies than they. An expert that has none in
// them is cut into equal parts.
#pragma once

#include <cstdint>

#include "algorithms/plan_own.h"
#include "algorithms/quotient.h"
#include "algorithms/replica_tables.h"
#include "host_device.h"
#include "planner.h"

namespace isoload {

struct ShareAloneProblem {
  int E, P;
  ReplicaTables tables;
  const int32_t* counts;  // [E] this source's copies
  const int32_t* quota;   // [P]
  int source;
  bool past = false;          // the quota is of batches before
  int64_t* recent = nullptr;  // [E] what this batch joins, see plan_own.h; or null
};

// u of a source and expert, in units of 2^-32.
ISOLOAD_HD inline uint32_t rounding_offset(int source, int e) {
  return 0x80000000u + uint32_t(source) * 0x9e3779b9u + uint32_t(e) * 0x5eb851ecu;
}

// floor(n * part / total + offset / 2^32) with n < 2^31 and part <= total < 2^31: every term below stays
// under 2^64.
ISOLOAD_HD inline int32_t rounded_part(int32_t n, int64_t part, int64_t total, uint32_t offset) {
  const int64_t product = n * part, whole = quotient_of_large(product, total);
  const uint64_t rest = product - whole * total;
  const bool up = (rest << 32) + offset * uint64_t(total) >= uint64_t(total) << 32;
  return static_cast<int32_t>(whole + up);
}

// Fills out [P]. Returns the lowest expert with a negative count or quota, with quotas of 2^31 copies or
// more, or of which this source has more copies than its quotas sum to (past: has copies, and there is no
// replica); -1 if there is none. Only then the counts join `recent`.
template <class Team>
ISOLOAD_HD int share_alone(Team& team, const ShareAloneProblem& in, int32_t* out) {
  const ReplicaTables& t = in.tables;
  team.for_each(in.P, [&](int p) { out[p] = 0; });
  team.sync();
  int64_t bad = 0;  // E - e of the lowest such expert
  team.for_each(in.E, [&](int e) {
    const int32_t n = in.counts[e];
    int64_t total = 0;
    bool wrong = n < 0;
    for (int j = t.offsets[e]; j < t.offsets[e + 1]; ++j) {
      total += in.quota[t.slots[j]];
      wrong |= in.quota[t.slots[j]] < 0;
    }
    wrong |= total > INT32_MAX || (in.past ? n > 0 && t.copies(e) == 0 : n > total);
    if (wrong) bad = bad > in.E - e ? bad : in.E - e;
    if (wrong || n == 0) return;
    const uint32_t offset = rounding_offset(in.source, e);
    const bool level = total == 0;
    if (level) total = t.copies(e);
    int64_t part = 0;
    int32_t before = 0;
    for (int j = t.offsets[e]; j < t.offsets[e + 1]; ++j) {
      part += level ? 1 : in.quota[t.slots[j]];
      const int32_t cut = rounded_part(n, part, total, offset);
      out[t.slots[j]] = cut - before;
      before = cut;
    }
  });
  bad = team.max(bad);
  if (bad > 0) return static_cast<int>(in.E - bad);
  team.for_each(in.recent ? in.E : 0, [&](int e) {
    in.recent[e] += (int64_t(in.counts[e]) << 16) - (in.recent[e] * kRecentLoss >> 16);
  });
  return -1;
}

struct ShareAlonePlanner : PlannerOf<ShareAloneProblem, int32_t*> {  // see planner.h; [P]
  ISOLOAD_HD static void select(Problem& in, Result& out, int64_t b) {
    const int64_t E = in.E, P = in.P;
    in.tables = in.tables.layer(b, E, P);
    in.counts += b * E;
    in.quota += b * P;
    if (in.recent) in.recent += b * E;
    out += b * P;
  }
  template <int W>
  ISOLOAD_HD static int64_t bytes(const Problem&) {
    return 0;
  }
  template <int W, class Team>
  ISOLOAD_HD static int solve(Team& team, const Problem& in, void*, Result out) {
    return share_alone(team, in, out);  // the expert that it refuses, or -1
  }
  template <class Team>
  ISOLOAD_HD static void refuse(Team& team, const Problem& in, Result out) {
    team.for_each(in.P, [&](int p) { out[p] = 0; });
  }
};

}  // namespace isoload
