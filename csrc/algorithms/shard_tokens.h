// shard_tokens: which rank computes the copies that no rank can keep (Libra, papers/004, Algorithm 2). Copies
// whose expert has a slot on their own rank stay there and all others start at their expert's home. Then the
// busiest rank above the mean B gives copies of its expert with most of them to the least loaded other rank
// that holds it, up to B, and all begins again; where none of its experts finds such a rank, the next one
// gives.
//
// As printed, a transfer is limited by what there is and by the taker's room, so a rank may give more than
// its excess; repaired, by the excess too. Copies that were moved never move again, since a taker stays at B
// or below. So a transfer empties an expert, fills a rank for good or ends a rank's excess: at most E + 2R.
// Integers only, ties go to the lowest rank, then slot.
#pragma once

#include <cstdint>

#include "algorithms/quotient.h"
#include "algorithms/replica_tables.h"
#include "algorithms/spare_fill.h"
#include "host_device.h"
#include "planner.h"
#include "workspace.h"

namespace isoload {

struct ShardingProblem : SplitProblem {  // with loads per source
  const int32_t *fixed, *home_slot;      // [R] copies that ranks carry besides, or null; [E]
  const bool* alive;                     // [R] or null
  int64_t tolerance_ppm;                 // of the mean
  bool printed;
};

struct ShardingWorkspace : Workspace<ShardingWorkspace> {
  int64_t* load;           // [R]
  int32_t *remote, *home;  // [E] copies at the home rank that may move; their replica's index in the tables
  int32_t* stuck;          // [E] whether no rank can take copies

  template <class Take>
  ISOLOAD_HD void lay_out(int64_t R, int64_t E, Take&& take) {
    take(R, load), take(E, remote, home, stuck);
  }
};

enum class ShardingStatus : int32_t { ok = kPlanned, bad_loads = 0, no_home = 1 };

template <class Team>
class Sharding {
 public:
  ISOLOAD_HD Sharding(Team& team, const ShardingProblem& problem, const ShardingWorkspace& workspace,
                      int32_t* quota)
      : team_(team), in_(problem), t_(problem.tables), ws_(workspace), quota_(quota) {}

  ISOLOAD_HD ShardingStatus run() {
    const ShardingStatus status = start();
    if (status != ShardingStatus::ok) return status;
    team_.alone([&](auto& group) {
      while (move(group)) continue;
    });
    return ShardingStatus::ok;
  }

 private:
  ISOLOAD_HD int32_t load(int source, int e) const { return in_.loads[int64_t(source) * in_.E + e]; }
  ISOLOAD_HD int32_t fixed(int r) const { return in_.fixed ? in_.fixed[r] : 0; }

  // Own copies where they are, remote ones at home.
  ISOLOAD_HD ShardingStatus start() {
    team_.for_each(in_.R * in_.S, [&](int p) { quota_[p] = 0; });
    team_.sync();
    int64_t copies = 0, live = 0;
    int32_t sign = 0, homeless = 0;
    team_.for_each(in_.R,
                   [&](int r) { sign |= fixed(r), copies += fixed(r), live += !in_.alive || in_.alive[r]; });
    team_.for_each(in_.E, [&](int e) {
      int64_t remote = 0;
      for (int s = 0; s < in_.R; ++s) sign |= load(s, e), remote += load(s, e);
      copies += remote;
      ws_.home[e] = -1;
      for (int j = t_.offsets[e]; j < t_.offsets[e + 1]; ++j) {
        const int32_t own = load(t_.ranks[j], e);
        quota_[t_.slots[j]] = own, remote -= own;
        if (in_.home_slot[e] >= 0 && in_.home_slot[e] / in_.S == t_.ranks[j]) ws_.home[e] = j;
      }
      homeless |= ws_.home[e] < 0 && remote > 0;
      ws_.remote[e] = static_cast<int32_t>(remote);
      ws_.stuck[e] = 0;
    });
    copies = team_.sum(copies), live = team_.sum(live);
    if (team_.any(sign < 0) || copies > INT32_MAX || live == 0) return ShardingStatus::bad_loads;
    if (team_.any(homeless)) return ShardingStatus::no_home;
    mean_ = rounded_up(copies, live);
    team_.for_each(in_.E, [&](int e) {
      if (ws_.home[e] >= 0) quota_[t_.slots[ws_.home[e]]] += ws_.remote[e];
    });
    team_.sync();
    team_.for_each(in_.R, [&](int r) {
      ws_.load[r] = fixed(r);
      for (int p = r * in_.S; p < (r + 1) * in_.S; ++p) ws_.load[r] += quota_[p];
    });
    team_.sync();
    return ShardingStatus::ok;
  }

  // One transfer. False: the busiest rank is near enough to the mean, or none is left.
  template <class Group>
  ISOLOAD_HD bool move(const Group& group) {
    auto next = [&](int last) { return next_rank(group, ws_.load, in_.R, last); };
    int r = next(-1);
    if (ws_.load[r] * 1000000 <= mean_ * (1000000 + in_.tolerance_ppm)) return false;
    for (; r >= 0 && ws_.load[r] > mean_; r = next(r))
      for (int e = hottest(group, r); e >= 0; e = hottest(group, r)) {
        const int to = taker(group, e, r);
        if (to >= 0) return transfer(group, e, r, to), true;
        group.sync();  // all have read what is stuck
        if (group.rank() == 0) ws_.stuck[e] = 1;
        group.sync();
      }
    return false;
  }

  template <class Group>
  ISOLOAD_HD void transfer(const Group& group, int e, int from, int to) {
    const int rank = t_.ranks[to];
    const int64_t excess = ws_.load[from] - mean_;
    int64_t copies = mean_ - ws_.load[rank];
    if (copies > ws_.remote[e]) copies = ws_.remote[e];
    if (!in_.printed && copies > excess) copies = excess;
    group.sync();  // all have read what changes now
    if (group.rank() == 0) {
      ws_.load[from] -= copies, ws_.load[rank] += copies;
      ws_.remote[e] -= static_cast<int32_t>(copies);
      quota_[t_.slots[ws_.home[e]]] -= static_cast<int32_t>(copies);
      quota_[t_.slots[to]] += static_cast<int32_t>(copies);
    }
    if (copies > excess)  // as printed it gave too much, and may take again
      group.for_each(in_.E, [&](int i) { ws_.stuck[i] = 0; });
    group.sync();
  }

  // The expert at home on the rank with most copies to move, of those that are not stuck; or -1.
  template <class Group>
  ISOLOAD_HD int hottest(const Group& group, int r) const {
    const int32_t* const split = t_.split + r * in_.S;
    int best;
    const int32_t most = group.largest(
        in_.S,
        [&](int i) {
          const int e = split[i] < 0 ? -1 : t_.order[split[i]];
          const bool gives =
              e >= 0 && ws_.home[e] >= 0 && t_.slots[ws_.home[e]] == r * in_.S + i && !ws_.stuck[e];
          return gives ? ws_.remote[e] : 0;
        },
        best);
    return most > 0 ? t_.order[split[best]] : -1;
  }

  // The replica on the least loaded other rank, if that is below the mean; or -1.
  template <class Group>
  ISOLOAD_HD int taker(const Group& group, int e, int from) const {
    const int first = t_.offsets[e];
    int best;
    const int64_t room = group.largest(
        t_.offsets[e + 1] - first,
        [&](int i) { return t_.ranks[first + i] == from ? 0 : mean_ - ws_.load[t_.ranks[first + i]]; }, best);
    return room > 0 ? first + best : -1;
  }

  Team& team_;
  const ShardingProblem& in_;
  const ReplicaTables t_;
  const ShardingWorkspace ws_;
  int32_t* const quota_;
  int64_t mean_ = 0;
};

struct ShardingPlanner : PlannerOf<ShardingProblem, int32_t*> {  // see planner.h; [P]
  ISOLOAD_HD static void select(Problem& in, Result& out, int64_t b) {
    in.SplitProblem::select(b);
    if (in.fixed) in.fixed += b * in.R;
    in.home_slot += b * in.E;
    out += b * in.R * in.S;
  }
  template <int W>
  ISOLOAD_HD static int64_t bytes(const Problem& in) {
    return ShardingWorkspace::bytes(in.R, in.E);
  }
  template <int W, class Team>
  ISOLOAD_HD static int solve(Team& team, const Problem& in, void* memory, Result out) {
    const ShardingWorkspace workspace = ShardingWorkspace::at(memory, in.R, in.E);
    return static_cast<int>(Sharding<Team>(team, in, workspace, out).run());
  }
  template <class Team>
  ISOLOAD_HD static void refuse(Team& team, const Problem& in, Result out) {
    team.for_each(in.R * in.S, [&](int p) { out[p] = 0; });
  }

  // Plain: no dead ranks.
  ISOLOAD_HD static bool is_plain(const Problem& in) { return in.alive == nullptr; }
  template <bool kPlain>
  ISOLOAD_HD static void prepare(Problem& in) {
    if (kPlain) in.alive = nullptr;
    lies_in_global(in.alive);
  }
  template <class Take>
  ISOLOAD_HD static void fetched(Problem& in, Result& out, Take&& take) {
    const int64_t E = in.E, P = int64_t(in.R) * in.S;
    take(in.loads, in.R * E), in.tables.fetched(E, P, take), take(in.home_slot, E);
    take(out, P), take(in.fixed, in.R, kOrNone);
  }
};

}  // namespace isoload
