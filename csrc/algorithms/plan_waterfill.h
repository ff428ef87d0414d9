// plan_waterfill: pour the copies of the shared experts over the ranks' routed loads so that the busiest rank
// carries as little as integers allow, moving as few copies as that takes, most of them to where their
// tokens go anyway.
//
//   level   the lowest peak P under which all shared copies fit: no split of them can do better
//   keep    every rank keeps what fits under P; only its excess moves, and only to ranks with room left
//   visit   copies[s][d] routed copies let about 3/4 as many tokens of s visit d, so that many shared copies
//           travel for nothing. A giver first spreads its excess in proportion to that, which leaves its
//           tokens most choice; shortest augmenting paths then make it a maximum flow
//   rest    what is left goes inside its node, then anywhere, as two number lines overlap
//
// Maximal: the kept copies; of the excess the part in `visit`; of what that leaves, the part inside a node.
// Not joined: another maximum flow might leave more for the node, and home never gives way to let another
// rank's copies in. Integers only, ties go to the lowest rank: the same share on every rank, team and device.
#pragma once

#include <climits>
#include <cstdint>

#include "rank_set.h"

namespace isoload {

enum class Candidates : int32_t { all = 0, node = 1, visited = 2 };
enum class WaterfillStatus : int32_t { ok = 0, negative = 1, too_many_copies = 2, beyond_limits = 3 };

struct WaterfillProblem {
  int R, per_node;        // ranks, ranks of a node
  int32_t per_token;      // shared experts: copies per token
  Candidates candidates;  // where a copy may go besides home
  const int32_t* copies;  // [R, R] routed copies that source s sends to rank d
  const int32_t* tokens;  // [R] tokens of source s that need the shared experts
  const int32_t* ticks;   // [R] cost of one copy on a rank, 1..2^20, or null: all 1
  const int32_t* limits;  // [R] most shared copies of a rank, or null
};

struct WaterfillResult {
  int32_t* share;  // [R, R] shared copies that source s sends to rank d
  int64_t* peak;   // [1] largest rank cost (copies, or ticks if given)
  int64_t* bound;  // [1] lower bound of the peak over all shares of these candidates
};

// Caller's memory; every array is written before it is read.
template <int W>
struct WaterfillWorkspace {
  RankSet<W>*open, *sent, *levels;  // [R] takers that giver s may send more, has sent some; [R] of a search
  int32_t *base, *excess, *room;    // [R] routed copies; shared copies without a place; places without a copy
  int32_t *line, *path;             // [R+1] wishes laid end to end; [R] givers and takers in turn

  static int64_t bytes(int64_t R) {
    return 3 * R * int64_t(sizeof(RankSet<W>)) + (5 * R + 1) * int64_t(sizeof(int32_t));
  }
  static WaterfillWorkspace at(void* memory, int64_t R) {
    WaterfillWorkspace ws;
    ws.open = static_cast<RankSet<W>*>(memory);
    ws.sent = ws.open + R;
    ws.levels = ws.sent + R;
    ws.base = reinterpret_cast<int32_t*>(ws.levels + R);
    ws.excess = ws.base + R;
    ws.room = ws.excess + R;
    ws.line = ws.room + R;
    ws.path = ws.line + R + 1;
    return ws;
  }
};

template <int W, class Team>
class Waterfill {
 public:
  Waterfill(Team& team, const WaterfillProblem& problem, WaterfillWorkspace<W> workspace,
            const WaterfillResult& out)
      : team_(team), in_(problem), ws_(workspace), share_(out.share), out_(out) {}

  WaterfillStatus solve() {
    const WaterfillStatus status = add_up();
    if (status != WaterfillStatus::ok) return status;
    const int64_t level = least_level();
    if (level < 0 || (in_.candidates == Candidates::visited && !homes_hold())) {
      return WaterfillStatus::beyond_limits;
    }
    keep(level);
    visit();
    if (in_.candidates == Candidates::visited) {
      stay();
    } else {
      pour(in_.per_node);
      if (in_.candidates == Candidates::all) pour(in_.R);
    }
    const int64_t peak = reached(level);
    if (team_.rank() == 0) *out_.peak = peak, *out_.bound = level;
    team_.sync();
    return WaterfillStatus::ok;
  }

 private:
  int32_t own(int s) const { return in_.per_token * in_.tokens[s]; }  // copies; add_up() saw that they fit
  int32_t& share(int s, int d) { return share_[int64_t(s) * in_.R + d]; }
  int64_t tick(int r) const { return in_.ticks ? in_.ticks[r] : 1; }
  int32_t limit(int r) const { return in_.limits ? in_.limits[r] : INT32_MAX; }
  int64_t capacity(int r, int64_t level) const {  // shared copies under a level that the routed ones respect
    const int64_t room = (in_.ticks ? level / in_.ticks[r] : level) - ws_.base[r];
    return room < limit(r) ? room : limit(r);
  }
  bool same_node(int s, int d) const { return s / in_.per_node == d / in_.per_node; }

  template <class F>
  int64_t sum(F&& f) {
    int64_t mine = 0;
    team_.for_each(in_.R, [&](int r) { mine += f(r); });
    return team_.sum(mine);
  }

  // Routed copies per rank; refuses what cannot be planned.
  WaterfillStatus add_up() {
    int32_t sign = 0, wrapped = 0;
    team_.for_each(in_.R, [&](int d) { sign |= ws_.base[d] = in_.copies[d]; });
    for (int s = 1; s < in_.R; ++s) {  // row by row; a lane keeps its columns, so no barrier between
      const int32_t* row = in_.copies + int64_t(s) * in_.R;
      team_.for_each(in_.R, [&](int d) {
        sign |= row[d];
        wrapped |= ws_.base[d] = static_cast<int32_t>(uint32_t(ws_.base[d]) + uint32_t(row[d]));
      });
    }
    team_.for_each(in_.R, [&](int s) { sign |= in_.tokens[s]; });
    if (team_.any(sign < 0)) return WaterfillStatus::negative;
    routed_ = sum([&](int r) { return ws_.base[r]; });
    shared_ = sum([&](int s) { return int64_t(in_.per_token) * in_.tokens[s]; });
    for (shift_ = 0; (in_.per_token * routed_) >> shift_ > INT32_MAX;) ++shift_;
    const bool fits = routed_ + shared_ <= INT32_MAX && !team_.any(wrapped < 0);
    return fits ? WaterfillStatus::ok : WaterfillStatus::too_many_copies;
  }

  // Level. -1 if the limits hold too little.

  int64_t least_level() {
    int64_t top = 0;
    team_.for_each(in_.R, [&](int r) {
      const int64_t cost = tick(r) * ws_.base[r];
      top = cost > top ? cost : top;
    });
    top = team_.max(top);
    if (in_.candidates != Candidates::node) {
      return least_level(top, routed_, shared_, in_.R, [&](auto&& f) { return sum(f); });
    }
    int64_t level = top, full = 0;  // each node pours into itself; the highest level is everybody's
    team_.for_each(in_.R / in_.per_node, [&](int node) {
      const int first = node * in_.per_node;
      auto sum_here = [&](auto&& f) {
        int64_t total = 0;
        for (int r = first; r < first + in_.per_node; ++r) total += f(r);
        return total;
      };
      const int64_t routed = sum_here([&](int r) { return ws_.base[r]; });
      const int64_t shared = sum_here([&](int r) { return own(r); });
      const int64_t here = least_level(top, routed, shared, in_.per_node, sum_here);
      full |= here < 0;
      level = here > level ? here : level;
    });
    return team_.any(full) ? -1 : team_.max(level);
  }

  // The same for `size` ranks that sum(f) adds f over: not below `low`, under which their routed copies fit.
  template <class Sum>
  int64_t least_level(int64_t low, int64_t routed, int64_t shared, int size, Sum&& sum) const {
    if (in_.limits && sum([&](int r) { return limit(r); }) < shared) return -1;
    const int64_t ideal = in_.ticks ? 0 : (routed + shared + size - 1) / size;
    low = ideal > low ? ideal : low;
    auto fits = [&](int64_t level) { return sum([&](int r) { return capacity(r, level); }) >= shared; };
    if (fits(low)) return low;
    int64_t high = low + 1;
    for (int64_t step = 1; !fits(high); high += step) low = high, step *= 2;
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      (fits(middle) ? high : low) = middle;
    }
    return high;
  }

  // Whether every rank may keep all it has: then nothing is stranded that the visited ranks do not take.
  bool homes_hold() {
    return sum([&](int s) { return own(s) > limit(s); }) == 0;
  }

  // Keep

  void keep(int64_t level) {
    team_.for_each(in_.R, [&](int s) {
      const int64_t most = capacity(s, level);
      const int32_t capacity = most < INT32_MAX ? static_cast<int32_t>(most) : INT32_MAX, mine = own(s);
      const int32_t kept = mine < capacity ? mine : capacity;
      ws_.excess[s] = mine - kept;
      ws_.room[s] = capacity - kept < shared_ ? capacity - kept : static_cast<int32_t>(shared_);
      for (int d = 0; d < in_.R; ++d) share(s, d) = 0;
      share(s, s) = kept;
      givers_.insert_if(mine > kept, s);
      takers_.insert_if(capacity > kept, s);
    });
    givers_ = unite(team_, givers_);
    takers_ = unite(team_, takers_);
  }

  // Visit

  void visit() {
    givers_.for_each([&](int s) { spread(s); });
    over_ = under_ = RankSet<W>();
    givers_.for_each([&](int s) { over_.insert_if(ws_.excess[s] > 0, s); });
    takers_.for_each([&](int d) { under_.insert_if(ws_.room[d] > 0, d); });
    if (over_.empty() || under_.empty()) return;
    list_ways();
    for (int depth = find_levels(); depth >= 0; depth = find_levels()) augment(depth);
  }

  // How many shared copies of s find a token that visits d anyway: about 3/4 of the routed copies, since one
  // token may send several. Every rank knows it without asking.
  int32_t visits(int s, int d) const {
    if (in_.candidates == Candidates::node && !same_node(s, d)) return 0;
    const int64_t tokens = 3 * int64_t(in_.copies[int64_t(s) * in_.R + d]) / 4;
    return in_.per_token * static_cast<int32_t>(tokens < in_.tokens[s] ? tokens : in_.tokens[s]);
  }
  int32_t unused(int s, int d) { return visits(s, d) - share(s, d); }

  // s's excess over the takers it visits, in proportion to what they would take: the wishes laid end to end
  // and scaled to what is there. The scale is rounded up in 32.32 bits, so the line ends at `there` exactly.
  // Wishes for several shared experts together might pass 2^31: then all are shifted, this being a start
  // only.
  void spread(int s) {
    team_.for_each(in_.R + 1, [&](int d) {
      int32_t wish = d < in_.R ? visits(s, d) : 0;
      if (d < in_.R) wish = wish < ws_.room[d] ? wish : ws_.room[d];
      ws_.line[d] = wish >> shift_;
    });
    team_.sync();
    const int32_t total = team_.scan(ws_.line, in_.R + 1), excess = ws_.excess[s];
    const int32_t there = excess < total ? excess : total;
    const uint64_t scale = total ? ((uint64_t(there) << 32) + total - 1) / total : 0;
    team_.for_each(in_.R, [&](int d) {
      const int32_t sent =
          static_cast<int32_t>((ws_.line[d + 1] * scale >> 32) - (ws_.line[d] * scale >> 32));
      if (sent == 0) return;
      share(s, d) = sent;
      ws_.room[d] -= sent;
    });
    team_.sync();
    if (team_.rank() == 0) ws_.excess[s] -= there;
    team_.sync();
  }

  void list_ways() {
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
  int find_levels() {
    RankSet<W> takers = under_, seen = under_;
    for (int depth = 0; !takers.empty(); ++depth) {
      RankSet<W> givers, next;
      team_.for_each(in_.R, [&](int s) { givers.insert_if(ws_.open[s].meets(takers), s); });
      givers = unite(team_, givers).subtract(seen);
      if (team_.rank() == 0) {
        ws_.levels[depth] = takers;
        ws_.levels[depth] |= givers;
      }
      if (givers.meets(over_)) return team_.sync(), depth;
      team_.for_each(in_.R, [&](int s) { next.unite_if(givers.contains(s), ws_.sent[s]); });
      takers = unite(team_, next).subtract(seen);
      seen |= givers;
      seen |= takers;
    }
    return -1;
  }

  // One path from the lowest giver with excess on the last level down to room on level 0, the widest hop
  // each time: a giver sends more to a taker, which returns as much to a giver of the next level.
  void augment(int depth) {
    const int source = ws_.levels[depth].lowest_in(over_);
    int s = source, d = -1, hops = 0;
    int32_t width = ws_.excess[s];
    for (int k = depth; k >= 0; --k) {
      if (k < depth) {
        const Hop back =
            widest(ws_.levels[k], [&](int g) { return ws_.sent[g].contains(d) ? share(g, d) : 0; });
        s = back.rank, width = back.width < width ? back.width : width;
      }
      const Hop on = widest(ws_.levels[k], [&](int t) {
        const int32_t more = ws_.open[s].contains(t) ? unused(s, t) : 0;
        return k == 0 && ws_.room[t] < more ? ws_.room[t] : more;
      });
      d = on.rank, width = on.width < width ? on.width : width;
      if (team_.rank() == 0) ws_.path[hops] = s, ws_.path[hops + 1] = d;
      hops += 2;
    }
    team_.sync();  // all lanes have read what lane 0 changes now
    if (team_.rank() == 0) {
      for (int i = 0; i + 1 < hops; ++i)
        i % 2 ? send(ws_.path[i + 1], ws_.path[i], -width) : send(ws_.path[i], ws_.path[i + 1], width);
      ws_.excess[source] -= width;
      ws_.room[d] -= width;
    }
    team_.sync();
    if (ws_.excess[source] == 0) over_.erase(source);
    if (ws_.room[d] == 0) under_.erase(d);
  }

  struct Hop {
    int rank;
    int32_t width;
  };

  // The rank of a level that width(rank) is largest for; the lowest of equal ones.
  template <class Width>
  Hop widest(const RankSet<W>& level, Width&& width) {
    int64_t best = 0;
    team_.for_each(in_.R, [&](int r) {
      if (!level.contains(r)) return;
      const int64_t key = int64_t(width(r)) << 32 | uint32_t(INT32_MAX - r);
      best = key > best ? key : best;
    });
    best = team_.max(best);
    return {INT32_MAX - static_cast<int>(best & 0xffffffff), static_cast<int32_t>(best >> 32)};
  }

  void send(int s, int d, int32_t copies) {
    share(s, d) += copies;
    unused(s, d) > 0 ? ws_.open[s].insert(d) : ws_.open[s].erase(d);
    share(s, d) > 0 ? ws_.sent[s].insert(d) : ws_.sent[s].erase(d);
  }

  // Rest

  // In every group of `size` ranks: excess and room laid end to end in rank order, each giver sends to the
  // places beside it, as far as the shorter line goes. No group is left with both.
  void pour(int size) {
    if (over_.empty()) return;
    team_.for_each(in_.R, [&](int r) {
      const int first = r / size * size;
      int64_t before = 0, left = ws_.excess[r], wanted = 0, start = 0;
      for (int s = first; s < r; ++s) before += ws_.excess[s];
      for (int d = first; d < first + size; ++d) {
        const int64_t place = ws_.room[d] > before ? ws_.room[d] - before : 0,
                      sent = left < place ? left : place;
        before = ws_.room[d] < before ? before - ws_.room[d] : 0;
        share(r, d) += static_cast<int32_t>(sent);
        left -= sent;
        start += d < r ? ws_.room[d] : 0;
        wanted += ws_.excess[d];
      }
      wanted = wanted > start ? wanted - start : 0;
      ws_.path[r] = static_cast<int32_t>(left);
      ws_.line[r] = ws_.room[r] > wanted ? static_cast<int32_t>(ws_.room[r] - wanted) : 0;
    });
    team_.sync();
    team_.for_each(in_.R, [&](int r) {
      ws_.excess[r] = ws_.path[r];
      ws_.room[r] = ws_.line[r];
    });
    team_.sync();
  }

  void stay() {
    team_.for_each(in_.R, [&](int s) { share(s, s) += ws_.excess[s]; });
  }

  // What stayed may pass the level; without it a rank reaches the level, or a lower one would have done.
  int64_t reached(int64_t level) {
    if (in_.candidates != Candidates::visited) return level;
    team_.for_each(in_.R, [&](int s) {
      const int64_t cost = ws_.excess[s] > 0 ? tick(s) * (int64_t(ws_.base[s]) + share(s, s)) : 0;
      level = cost > level ? cost : level;
    });
    return team_.max(level);
  }

  Team& team_;
  const WaterfillProblem& in_;
  const WaterfillWorkspace<W> ws_;
  int32_t* const share_;
  const WaterfillResult& out_;
  int64_t routed_ = 0, shared_ = 0;  // all routed and shared copies
  int shift_ = 0;
  RankSet<W> givers_, takers_;  // ranks that keep less than they have; that have room besides
  RankSet<W> over_, under_;     // those of them with excess, with room now
};

}  // namespace isoload
