// visit_flow: as many shared copies as possible from ranks with excess to ranks with room that their tokens
// visit anyway.
//
// copies[s][d] routed copies let about 3/4 as many tokens of s visit d, and at most as many: all that follows
// from counts, alike on every rank. First within 3/4, then within all:
//
//   needs   a taker whose room the others lack takes that much, from its givers in proportion
//   spread  givers send what they have left to the takers in proportion, which leaves their tokens most
//           choice of who goes where
//   paths   shortest augmenting paths on ranks make it a maximum flow; hardly ever one is left to find
//
// Integers only, ties go to the lowest rank.
#pragma once

#include <climits>
#include <cstdint>

#include "algorithms/quotient.h"
#include "host_device.h"
#include "rank_set.h"
#include "workspace.h"

namespace isoload {

struct VisitProblem {
  int R;                  // ranks
  int32_t per_token;      // shared copies per token
  const int32_t* copies;  // [R, R] routed copies that source s sends to rank d
  const int32_t* tokens;  // [R]
};

template <int W>
struct VisitWorkspace : Workspace<VisitWorkspace<W>> {  // R here: places<W>(R)
  RankSet<W>*open, *sent, *levels;  // [R] takers that giver s may send more, has sent some; [R] of a search
  int32_t *givers, *takers, *wish;  // [R] ranks with excess, with room; what a rank would send or take
  int32_t* path;                    // [R] takers in need; givers and takers in turn

  template <class Take>
  ISOLOAD_HD void lay_out(int64_t num_ranks, Take&& take) {
    const int64_t R = places<W>(num_ranks);
    take(R, open, sent, levels), take(R, givers, takers, wish, path);
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
        share_(share),
        over_(givers),
        under_(takers) {}

  // Returns how many paths the start left to find.
  ISOLOAD_HD int run() {
    int32_t spare = 0;
    team_.for_each(in_.R, [&](int r) { spare += (room_[r] < kMost ? room_[r] : kMost) - excess_[r]; });
    spare = team_.sum32(spare);
    spare_ = spare > 0 ? spare : 0;
    int paths = 0;
    ISOLOAD_ROLLED
    for (quarters_ = 3; quarters_ <= 4 && ends(); ++quarters_) {
      start();
      if (!ends()) break;
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
  // What counts for a start, which need not be exact, so that the sum over all ranks is below 2^31.
  static constexpr int32_t kMost = INT32_MAX / kMaxRanks;

  ISOLOAD_HD int32_t& share(int s, int d) { return share_[s * in_.R + d]; }

  // How many shared copies of s find a token that visits d.
  ISOLOAD_HD int32_t visits(int s, int d) const {
    const uint32_t copies = in_.copies[s * in_.R + d], tokens = in_.tokens[s],
                   within = quarters_ == 4 ? copies : copies - (copies + 3) / 4;
    return in_.per_token * static_cast<int32_t>(within < tokens ? within : tokens);
  }
  ISOLOAD_HD int32_t unused(int s, int d) { return visits(s, d) - share(s, d); }

  ISOLOAD_HD bool ends() const { return !over_.empty() && !under_.empty(); }

  // A direct way for nearly all: takers in need take from givers, then givers send to takers.
  ISOLOAD_HD void start() {
    int count[2], turns = 1;  // givers and takers
    ISOLOAD_ROLLED
    for (int step = 0; step < 2; ++step) {
      const bool needs = step == 0;
      ISOLOAD_ROLLED
      for (int side = 0; side < 2 && turns > 0; ++side)
        count[side] = list(side ? room_ : excess_, side ? ws_.takers : ws_.givers);
      turns = needs ? list_needs(count[0], count[1]) : count[0];
      ISOLOAD_ROLLED
      for (int k = 0; k < turns; ++k)
        spread(needs, needs ? ws_.path[k] : ws_.givers[k], count[needs ? 0 : 1]);
      team_.sync();
    }
    RankSet<W> done;
    team_.for_each(in_.R, [&](int r) { done.insert_if(excess_[r] + room_[r] == 0, r); });  // nobody has both
    unite(team_, done);
    over_.subtract(done);
    under_.subtract(done);
  }

  // The ranks that have any, in order. Returns how many.
  ISOLOAD_HD int list(const int32_t* have, int32_t* ranks) {
    int n = 0;
    ISOLOAD_ROLLED
    for (int first = 0; first < in_.R; first += team_.size()) {
      const int r = first + team_.rank();
      const bool has = r < in_.R && have[r] > 0;
      int32_t more;
      const int before = team_.lanes_before(has, more);
      if (has) ranks[n + before] = r;
      n += more;
    }
    team_.sync();
    return n;
  }

  // What d must get because the other takers have too little room for it.
  ISOLOAD_HD int32_t need(int d) const { return room_[d] - spare_; }

  // The takers in need, first those whose givers have the least to choose from, in `path`. Returns how many.
  ISOLOAD_HD int list_needs(int givers, int takers) {
    int32_t n = 0;
    team_.for_each(takers, [&](int i) {
      const int d = ws_.takers[i];
      int64_t choice = INT32_MAX;
      if (need(d) > 0) {
        int32_t wishes = 0;
        ISOLOAD_ROLLED
        for (int j = 0; j < givers; ++j) wishes += wish(ws_.givers[j], d, excess_[ws_.givers[j]]);
        choice = quotient(int64_t(wishes) << 8, need(d));
        choice = choice < INT32_MAX ? choice : INT32_MAX - 1;
        ++n;
      }
      ws_.wish[i] = static_cast<int32_t>(choice);
    });
    n = team_.sum32(n);
    if (n == 0) return 0;
    team_.sync();
    team_.for_each(takers, [&](int i) {
      const int32_t choice = ws_.wish[i];
      if (choice == INT32_MAX) return;
      int place = 0;
      ISOLOAD_ROLLED
      for (int j = 0; j < takers; ++j) place += ws_.wish[j] < choice + (j < i);
      ws_.path[place] = ws_.takers[i];
    });
    team_.sync();
    return n;
  }

  // What s would send to d, of `most` at most.
  ISOLOAD_HD int32_t wish(int s, int d, int32_t most) {
    const int32_t more = unused(s, d);
    most = most < kMost ? most : kMost;
    return more < most ? more : most;
  }

  // What taker r needs from the givers, or what giver r has to the takers, n of them, in proportion to what
  // each would: rounded down, and what that leaves, one each to the first.
  ISOLOAD_HD void spread(bool needs, int r, int n) {
    const int32_t* const partners = needs ? ws_.givers : ws_.takers;
    int32_t* const theirs = needs ? excess_ : room_;
    int32_t* const mine = needs ? room_ : excess_;
    const int32_t copies = needs ? need(r) : excess_[r];
    const bool once = n <= team_.size();  // then a lane need not read back what it has
    int32_t total = 0, left = 0, wished = 0;
    int p = 0;
    team_.for_each(n, [&](int i) {
      p = partners[i];
      total += wished = wish(needs ? p : r, needs ? r : p, theirs[p]);
      if (!once) ws_.wish[i] = wished;
    });
    total = team_.sum32(total);
    if (total == 0) return;
    const int32_t there = copies < total ? copies : total;
    const uint64_t scale = quotient(int64_t(there) << 32, total);  // what it is off moves no sum below 2^31
    team_.for_each(n, [&](int i) {
      if (!once) wished = ws_.wish[i];
      left += static_cast<int32_t>(wished * scale >> 32);
    });
    left = there - team_.sum32(left);
    ISOLOAD_ROLLED
    for (int first = 0; first < n; first += team_.size()) {
      const int i = first + team_.rank();
      if (!once) wished = i < n ? ws_.wish[i] : 0, p = i < n ? partners[i] : 0;
      const int32_t part = static_cast<int32_t>(wished * scale >> 32);
      int32_t more;
      const int before = team_.lanes_before(part < wished, more);
      const int32_t sent = part + (part < wished && before < left);
      left -= more;
      if (sent == 0) continue;
      share(needs ? p : r, needs ? r : p) += sent;
      theirs[p] -= sent;
    }
    team_.sync();  // all lanes have read it; what else a lane reads here, no other one writes
    if (team_.rank() == 0) mine[r] -= there;
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
    const int hops = 2 * depth + 1;
    int s = source, d = -1;
    int32_t width = excess_[s];
    if (team_.rank() == 0) ws_.path[0] = s;
    ISOLOAD_ROLLED
    for (int hop = 0; hop < hops; ++hop) {
      const bool back = hop % 2 == 1;
      const int level = depth - (hop + 1) / 2;
      int& end = back ? s : d;
      const int32_t most = team_.largest(
          in_.R,
          [&](int r) {
            if (!ws_.levels[level].contains(r)) return 0;
            if (back) return ws_.sent[r].contains(d) ? share(r, d) : 0;
            const int32_t more = ws_.open[s].contains(r) ? unused(s, r) : 0;
            return level == 0 && room_[r] < more ? room_[r] : more;
          },
          end);
      width = most < width ? most : width;
      if (team_.rank() == 0) ws_.path[hop + 1] = end;
    }
    team_.sync();  // nobody looks any more
    if (team_.rank() == 0) {
      ISOLOAD_ROLLED
      for (int i = 0; i < hops; ++i) {
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

  ISOLOAD_HD void send(int s, int d, int32_t copies) {
    const int32_t sent = share(s, d) += copies;
    ws_.open[s].erase(d), ws_.open[s].insert_if(visits(s, d) > sent, d);
    ws_.sent[s].erase(d), ws_.sent[s].insert_if(sent > 0, d);
  }

  Team& team_;
  const VisitProblem& in_;
  const VisitWorkspace<W> ws_;
  const RankSet<W> givers_, takers_;
  int32_t *const excess_, *const room_, *const share_;
  RankSet<W> over_, under_;  // givers with excess, takers with room
  int quarters_ = 3;         // of the copies, how many count as visits
  int32_t spare_ = 0;        // places that stay free when all excess has found one
};

}  // namespace isoload
