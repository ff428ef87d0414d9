// visit_flow: as many shared copies as possible from ranks with excess to ranks with room that their tokens
// visit anyway.
//
// copies[s][d] routed copies let about 3/4 as many tokens of s visit d, and at most as many; every rank knows
// that without asking. Within 3/4 a giver first spreads its excess over the takers in proportion, which
// leaves its tokens most choice of who goes where. That is nearly always all; else shortest augmenting paths
// on ranks make it a maximum flow, first within 3/4, then within all. Integers only, ties go to the lowest
// rank.
#pragma once

#include <climits>
#include <cstdint>

#include "algorithms/quotient.h"
#include "host_device.h"
#include "rank_set.h"

namespace isoload {

struct VisitProblem {
  int R, reach;           // ranks; ranks of a group that sends copies to itself only: a node, or all
  int32_t per_token;      // shared copies per token
  const int32_t* copies;  // [R, R] routed copies that source s sends to rank d
  const int32_t* tokens;  // [R]
};

// Caller's memory; every array is written before it is read.
template <int W>
struct VisitWorkspace {
  RankSet<W>*open, *sent, *levels;  // [R] takers that giver s may send more, has sent some; [R] of a search
  int32_t *line, *path;             // [R+1] wishes laid end to end; [R] givers and takers in turn

  ISOLOAD_HD static int64_t bytes(int64_t num_ranks) {
    const int64_t R = places<W>(num_ranks);
    return 3 * R * int64_t(sizeof(RankSet<W>)) + (2 * R + 1) * int64_t(sizeof(int32_t));
  }
  ISOLOAD_HD static VisitWorkspace at(void* memory, int64_t num_ranks) {
    const int64_t R = places<W>(num_ranks);
    VisitWorkspace ws;
    ws.open = static_cast<RankSet<W>*>(memory);
    ws.sent = ws.open + R;
    ws.levels = ws.sent + R;
    ws.line = reinterpret_cast<int32_t*>(ws.levels + R);
    ws.path = ws.line + R + 1;
    return ws;
  }
};

// Givers have excess [R] and no room, takers room [R] and no excess. share [R, R] gains what is sent.
template <int W, class Team>
class VisitFlow {
 public:
  ISOLOAD_HD VisitFlow(Team& team, const VisitProblem& problem, VisitWorkspace<W> workspace,
                       RankSet<W> givers, RankSet<W> takers, int32_t* excess, int32_t* room, int32_t* share)
      : team_(team),
        in_(problem),
        ws_(workspace),
        givers_(givers),
        takers_(takers),
        excess_(excess),
        room_(room),
        share_(share) {}

  // routed: the sum of copies. Returns how many paths the start left to find.
  ISOLOAD_HD int run(int64_t routed) {
    int shift = 0;  // wishes for several shared experts together might pass 2^31; a start need not be exact
    while ((in_.per_token * routed) >> shift > INT32_MAX) ++shift;
    givers_.for_each([&](int s) { spread(s, shift); });
    givers_.for_each([&](int s) { over_.insert_if(excess_[s] > 0, s); });
    takers_.for_each([&](int d) { under_.insert_if(room_[d] > 0, d); });
    int paths = 0;
    for (quarters_ = 3; quarters_ <= 4 && !over_.empty() && !under_.empty(); ++quarters_) {
      list_ways();
      for (;; ++paths) {  // one call: a kernel has the search once
        const int depth = find_levels();
        if (depth < 0) break;
        augment(depth);
      }
    }
    return paths;
  }

 private:
  ISOLOAD_HD int32_t& share(int s, int d) { return share_[int64_t(s) * in_.R + d]; }

  // How many shared copies of s find a token that visits d.
  ISOLOAD_HD int32_t visits(int s, int d) const {
    if (in_.reach < in_.R && uint32_t(s) / uint32_t(in_.reach) != uint32_t(d) / uint32_t(in_.reach)) return 0;
    const int64_t tokens = quarters_ * int64_t(in_.copies[int64_t(s) * in_.R + d]) / 4;
    return in_.per_token * static_cast<int32_t>(tokens < in_.tokens[s] ? tokens : in_.tokens[s]);
  }
  ISOLOAD_HD int32_t unused(int s, int d) { return visits(s, d) - share(s, d); }

  // s's excess over the takers it visits, in proportion to what they would take: the wishes laid end to end
  // and scaled to what is there. The scale is rounded up in 32.32 bits, so the line ends at `there` exactly.
  ISOLOAD_HD void spread(int s, int shift) {
    const int32_t excess = excess_[s];
    team_.for_each(in_.R + 1, [&](int d) {
      int32_t wish = 0;
      if (d < in_.R) wish = visits(s, d) < room_[d] ? visits(s, d) : room_[d];
      ws_.line[d] = wish >> shift;
    });
    const int32_t total = team_.scan(ws_.line, in_.R + 1);
    const int32_t there = excess < total ? excess : total;
    const uint64_t scale = total ? quotient_of_large((int64_t(there) << 32) + total - 1, total) : 0;
    team_.for_each(in_.R, [&](int d) {
      const int32_t sent =
          static_cast<int32_t>((ws_.line[d + 1] * scale >> 32) - (ws_.line[d] * scale >> 32));
      if (sent == 0) return;
      share(s, d) = sent;
      room_[d] -= sent;
    });
    if (team_.rank() == 0) excess_[s] = excess - there;
    team_.sync();
  }

  ISOLOAD_HD void list_ways() {
    team_.for_each(in_.R, [&](int s) {
      RankSet<W> open, sent;
      if (givers_.contains(s)) {
        takers_.for_each([&](int d) {
          open.insert_if(unused(s, d) > 0, d);
          sent.insert_if(share(s, d) > 0, d);
        });
      }
      ws_.open[s] = open, ws_.sent[s] = sent;
    });  // find_levels()'s reductions are the barrier
  }

  // Breadth first, backwards. Level 0: the takers with room and the givers that may send them more; level k:
  // the takers that givers of level k-1 could take copies back from, and the givers that may send those more.
  // Returns the level that holds a giver with excess, or -1. Nobody is both, so a level is one set.
  ISOLOAD_HD int find_levels() {
    RankSet<W> takers = under_, seen = under_;
    for (int depth = 0; !takers.empty(); ++depth) {
      RankSet<W> givers, next;
      team_.for_each(in_.R, [&](int s) { givers.insert_if(ws_.open[s].meets(takers), s); });
      unite(team_, givers);
      givers.subtract(seen);
      if (team_.rank() == 0) {
        ws_.levels[depth] = takers;
        ws_.levels[depth] |= givers;
      }
      if (givers.meets(over_)) return team_.sync(), depth;
      team_.for_each(in_.R, [&](int s) { next.unite_if(givers.contains(s), ws_.sent[s]); });
      unite(team_, next);
      takers = next.subtract(seen);
      seen |= givers;
      seen |= takers;
    }
    return -1;
  }

  // One path from the lowest giver with excess on the last level down to room on level 0, the widest hop
  // each time: a giver sends more to a taker, which returns as much to a giver of the next level.
  ISOLOAD_HD void augment(int depth) {
    const int source = ws_.levels[depth].lowest_in(over_);
    int s = source, d = -1, hops = 0;
    int32_t width = excess_[s];
    for (int k = depth; k >= 0; --k) {
      if (k < depth) {
        const Hop back =
            widest(ws_.levels[k], [&](int g) { return ws_.sent[g].contains(d) ? share(g, d) : 0; });
        s = back.rank, width = back.width < width ? back.width : width;
      }
      const Hop on = widest(ws_.levels[k], [&](int t) {
        const int32_t more = ws_.open[s].contains(t) ? unused(s, t) : 0;
        return k == 0 && room_[t] < more ? room_[t] : more;
      });
      d = on.rank, width = on.width < width ? on.width : width;
      if (team_.rank() == 0) ws_.path[hops] = s, ws_.path[hops + 1] = d;
      hops += 2;
    }
    if (team_.rank() == 0) {
      ISOLOAD_ROLLED
      for (int i = 0; i + 1 < hops; ++i) {
        const int back = i % 2;  // a taker returns copies
        send(ws_.path[i + back], ws_.path[i + 1 - back], back ? -width : width);
      }
      excess_[source] -= width;
      room_[d] -= width;
    }
    team_.sync();  // before anybody looks for the next path
    if (excess_[source] == 0) over_.erase(source);
    if (room_[d] == 0) under_.erase(d);
  }

  struct Hop {
    int rank;
    int32_t width;
  };

  // The rank of a level that width(rank) is largest for; the lowest of equal ones.
  template <class Width>
  ISOLOAD_HD Hop widest(const RankSet<W>& level, Width&& width) {
    int64_t best = 0;
    team_.for_each(in_.R, [&](int r) {
      if (!level.contains(r)) return;
      const int64_t key = int64_t(width(r)) << 32 | uint32_t(INT32_MAX - r);
      best = key > best ? key : best;
    });
    best = team_.max(best);
    return {INT32_MAX - static_cast<int>(best & 0xffffffff), static_cast<int32_t>(best >> 32)};
  }

  ISOLOAD_HD void send(int s, int d, int32_t copies) {
    share(s, d) += copies;
    unused(s, d) > 0 ? ws_.open[s].insert(d) : ws_.open[s].erase(d);
    share(s, d) > 0 ? ws_.sent[s].insert(d) : ws_.sent[s].erase(d);
  }

  Team& team_;
  const VisitProblem& in_;
  const VisitWorkspace<W> ws_;
  const RankSet<W> givers_, takers_;
  int32_t *const excess_, *const room_, *const share_;
  RankSet<W> over_, under_;  // givers with excess, takers with room
  int quarters_ = 3;         // of the copies, how many count as visits
};

}  // namespace isoload
