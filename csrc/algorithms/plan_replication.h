// plan_replication: which experts every rank borrows for the next batch, from a forecast of who asks for what
// (Libra, papers/004, Algorithm 1). A copy is computed on its source rank if that holds the expert, else at
// the expert's home.
//
// First every rank takes the remote experts that it asks for most, so that more copies stay local. Then the
// busiest rank above the mean hands its expert with most remote copies to the least loaded rank with room,
// which may pass the mean by it no more. As printed, the second phase stalls at the first refusal: nothing
// changes, so each further round meets the same one. Repaired, it tries the rank's next expert, then the next
// rank. Integers only, ties go to the lowest rank, then slot (in the first phase: expert).
#pragma once

#include <cstdint>

#include "algorithms/spare_fill.h"
#include "host_device.h"
#include "planner.h"

namespace isoload {

struct ReplicationProblem : FillProblem {  // with loads per source and empty spare slots
  int local;                               // spare slots per rank for the first phase
  bool printed;
};

template <class Team>
class Replication {
 public:
  ISOLOAD_HD Replication(Team& team, const ReplicationProblem& problem, const FillWorkspace& workspace,
                         const FillResult& out)
      : team_(team), in_(problem), ws_(workspace), fill_(team, in_, ws_, out) {}

  ISOLOAD_HD bool run() {
    if (!fill_.start()) return false;
    fill_.for_each_rank([&](int r, auto& group) { take_local(r, group); });
    team_.sync();
    team_.for_each(in_.E, [&](int e) {
      int32_t remote = 0;
      for (int s = 0; s < in_.R; ++s) remote += fill_.holds(s, e) ? 0 : fill_.load(s, e);
      ws_.total[e] = remote;
    });
    team_.sync();
    fill_.for_each_rank([&](int r, auto& group) {
      const int64_t copies = copies_of(r, group);
      if (group.rank() == 0) ws_.load[r] = fill_.fixed(r) + copies;
    });
    team_.sync();
    team_.alone([&](auto& group) {
      for (int i = (in_.spare - in_.local) * in_.R; i > 0 && hand_over(group); --i) continue;
    });
    fill_.publish();
    return true;
  }

 private:
  template <class Group>
  ISOLOAD_HD void take_local(int r, Group& group) {
    for (int i = 0; i < in_.local && ws_.room[r] > 0; ++i) {
      int hottest = 0;
      int32_t most = 0;
      group.for_each(in_.E, [&](int e) {
        if (fill_.load(r, e) > most && !fill_.holds(r, e)) hottest = e, most = fill_.load(r, e);
      });
      const int64_t best = group.max(int64_t(most) << 32 | (INT32_MAX - hottest));
      if (best >> 32 == 0) return;
      if (group.rank() == 0) fill_.place(r, INT32_MAX - static_cast<int>(best & INT32_MAX));
      group.sync();
    }
  }

  // Its own copies of what it holds, and the remote ones of what it is the home of.
  template <class Group>
  ISOLOAD_HD int64_t copies_of(int r, Group& group) const {
    int64_t copies = 0;
    group.for_each(in_.E, [&](int e) { copies += fill_.holds(r, e) ? fill_.load(r, e) : 0; });
    group.for_each(in_.S, [&](int s) { copies += is_home(r * in_.S + s) ? remote_of(r * in_.S + s) : 0; });
    return group.sum(copies);
  }
  ISOLOAD_HD bool is_home(int p) const {
    const int e = in_.slot_to_expert[p];
    return e >= 0 && e < in_.E && in_.home_slot[e] == p;
  }
  // Copies of the expert in a home slot that other ranks send there.
  ISOLOAD_HD int32_t& remote_of(int p) const { return ws_.total[in_.slot_to_expert[p]]; }

  // One expert handed over. False: no rank is above the mean, or nothing fits.
  template <class Group>
  ISOLOAD_HD bool hand_over(const Group& group) {
    const int64_t mean = fill_.mean();
    auto next = [&](int last) { return next_rank(group, ws_.load, in_.R, last); };
    for (int source = next(-1); source >= 0 && ws_.load[source] > mean; source = next(source)) {
      for (int p = next_slot(group, source, -1); p >= 0; p = next_slot(group, source, p)) {
        const int e = in_.slot_to_expert[p], to = fill_.taker(group, e);
        const int64_t own = to < 0 ? 0 : fill_.load(to, e);
        if (to >= 0 && ws_.load[to] + own <= mean) {
          group.sync();  // all have read what changes now
          if (group.rank() == 0) {
            fill_.place(to, e);
            ws_.load[to] += own, ws_.load[source] -= own, remote_of(p) -= static_cast<int32_t>(own);
          }
          group.sync();
          return true;
        }
        if (in_.printed) return false;
      }
      if (in_.printed) return false;
    }
    return false;
  }

  // The next home slot of a rank by falling remote copies, while there are any; or -1.
  template <class Group>
  ISOLOAD_HD int next_slot(const Group& group, int r, int last) const {
    const int first = r * in_.S;
    const int32_t upto = last < 0 ? INT32_MAX : remote_of(last);
    int best;
    const int32_t most = group.largest(
        in_.S,
        [&](int i) {
          const int32_t copies = is_home(first + i) ? remote_of(first + i) : 0;
          return copies < upto || (copies == upto && first + i > last) ? copies : 0;
        },
        best);
    return most > 0 ? first + best : -1;
  }

  Team& team_;
  const ReplicationProblem& in_;
  const FillWorkspace& ws_;
  SpareFill<Team> fill_;
};

using ReplicationPlanner = FillPlanner<Replication, ReplicationProblem>;  // see planner.h

}  // namespace isoload
