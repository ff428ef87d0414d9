// The last part of plan_exact: shortest paths of ranks from an overloaded one to one with room, which whole
// copies are moved along, until there is none and the target is proved to be the least, or raised.
#pragma once

#include <climits>
#include <cstdint>

#include "algorithms/plan_exact_parts.h"
#include "host_device.h"
#include "rank_set.h"

namespace isoload {

struct PathsFound {
  int64_t bound;         // proved
  int32_t paths, steps;  // augmentations, Newton steps
  bool cut;              // the budget ended it
};

// From the bound that `found` has, on the load and the quota as they are. A barrier comes before it. One loop
// for both searches, for paths and for what no path leaves: a kernel has the code of one.
template <class Paths>
ISOLOAD_HD PathsFound augment(Paths& paths, const ExactProblem& in, PathsFound found) {
  for (bool listed = false;; listed = true) {
    paths.aim(with_tolerance(found.bound, in.tolerance_ppm));
    if (!listed && paths.is_above()) paths.list_ranks();
    bool stuck = false;
    while (paths.is_above()) {
      const int depth = paths.search(stuck);
      if (stuck) break;
      stuck = depth < 0;
      if (stuck) continue;
      found.cut = found.paths >= in.budget;
      if (found.cut) return found;
      paths.follow(depth);
      ++found.paths;
    }
    if (!stuck) return found;
    found.bound = paths.certify();
    ++found.steps;
  }
}

// Ranks that carry more than the target, and less; those that a search has reached.
template <int W>
struct Sides {
  RankSet<W> over, under, reached;
};

// Kept: Sides<W>, or a reference to them. Several words are indexed at run time, so nvcc keeps all of an
// object in memory that has them as a member. That is slower, and the shorter code in a kernel with much
// besides.
template <int W, class Team, class Kept>
class ExactPaths {
 public:
  ISOLOAD_HD ExactPaths(Team& team, const ExactProblem& problem, ExactWorkspace<W> workspace, int32_t* quota,
                        Sides<W>& sides)
      : team_(team),
        in_(problem),
        t_(problem.tables),
        ws_(workspace),
        quota_(quota),
        num_split_(problem.tables.num_split()),
        sides_(sides) {}

  ISOLOAD_HD void list_ranks() {
    team_.for_each(num_split_, [&](int i) {
      RankSet<W> holders, givers;
      ISOLOAD_ROLLED
      for (int j = ws_.split.first[i]; j < ws_.split.last[i]; ++j) {
        holders.insert(t_.ranks[j]);
        givers.insert_if(quota_[t_.slots[j]] > 0, t_.ranks[j]);
      }
      ws_.holders[i] = holders;
      ws_.givers[i] = givers;
    });  // search()'s reductions are the barrier
  }

  // Sets the target: what each rank may carry, who carries more, who less.
  ISOLOAD_HD void aim(int64_t target) {
    sides_.over = RankSet<W>(), sides_.under = RankSet<W>();
    team_.for_each(in_.R, [&](int r) {
      const int64_t room = in_.ticks ? quotient(target, in_.ticks[r]) : target;
      ws_.cap[r] = static_cast<int32_t>(room < INT32_MAX ? room : INT32_MAX);
      sides_.over.insert_if(ws_.load[r] > ws_.cap[r], r);
      sides_.under.insert_if(ws_.load[r] < ws_.cap[r], r);
    });
    unite(team_, sides_.over, in_.R);
    unite(team_, sides_.under, in_.R);
  }
  ISOLOAD_HD bool is_above() const { return !sides_.over.empty(); }

  // Breadth first, backwards: level 0 has room, level k can hand copies to level k-1. Returns the level that
  // holds an overloaded rank, or -1. Or forward, from all overloaded ranks to all that they reach.
  ISOLOAD_HD int search(bool forward) {
    const RankSet<W>* const by = forward ? ws_.givers : ws_.holders;
    const RankSet<W>* const to = forward ? ws_.holders : ws_.givers;
    RankSet<W>& seen = sides_.reached;
    seen = forward ? sides_.over : sides_.under;
    RankSet<W> frontier = seen;
    for (int depth = 0;;) {
      if (!forward && frontier.meets(sides_.over)) {
        source_ = frontier.lowest_in(sides_.over);
        return depth;
      }
      if (team_.rank() == 0) ws_.levels[depth] = frontier;
      RankSet<W> next;
      team_.for_each(num_split_, [&](int i) { next.unite_if(by[i].meets(frontier), to[i]); });
      unite(team_, next, in_.R);
      if (next.subtract(seen).empty()) return -1;
      seen |= next;
      frontier = next;
      ++depth;
    }
  }

  // What the overloaded ranks have reached, its load cannot leave, so its mean is a bound. Never all
  // ranks: the target is at least the level at which all ranks together have room for everything, `pour`
  // included. So `pour` need not be counted here: a smaller set can leave it to the others.
  ISOLOAD_HD int64_t certify() {
    const RankSet<W>& closed = sides_.reached;
    int64_t copies = 0;
    int size = 0;
    closed.for_each([&](int r) { copies += ws_.load[r], ++size; });
    return smallest_peak(team_, in_.ticks, in_.R, copies, size, closed, ws_.found);
  }

  // One path from the lowest overloaded rank of the last level down to level 0, the widest hop each time.
  // What the lanes have read they need not read again: each works out how it changes.
  ISOLOAD_HD void follow(int depth) {
    const int32_t load = ws_.load[source_], excess = load - ws_.cap[source_];
    int32_t width = excess, room = 0;
    int u = source_;
    for (int k = depth; k > 0; --k) {
      if (team_.rank() == 0) ws_.way[k] = u;
      ReadSet<W> below = W == 1 && k == 1 ? sides_.under : ws_.levels[k - 1];
      const Pick giver = widest(u, below);
      if (giver.mine) ws_.from[k - 1] = giver.place, ws_.via[k - 1] = giver.index;
      width = giver.value < width ? giver.value : width;
      const Pick taker = pick_replica(giver.index, below, k == 1);
      if (taker.mine) ws_.to[k - 1] = taker.place;
      u = taker.index, room = taker.value;
    }
    width = room < width ? room : width;
    if (team_.rank() == 0) ws_.way[0] = u;
    team_.sync();  // the path is there, and all lanes have read the loads that change now
    team_.for_each(depth, [&](int k) { move(k, width); });
    if (team_.rank() == 0) {
      ws_.load[source_] = load - width;
      ws_.load[u] += width;
    }
    team_.sync();
    if (width == excess) sides_.over.erase(source_);
    if (width == room) sides_.under.erase(u);
  }

 private:
  // The largest value of all lanes, then the lowest index; mine: this lane's, at `place`.
  struct Pick {
    int32_t value;
    int index, place;
    bool mine;
  };
  ISOLOAD_HD static int64_t key(int32_t value, int index) {
    return int64_t(value) << 32 | uint32_t(INT32_MAX - index);
  }
  ISOLOAD_HD Pick best(int64_t key, int place) {  // -1: this lane has none
    const int64_t top = team_.max(key);
    const int index = INT32_MAX - static_cast<int>(top & 0xffffffff);
    return {static_cast<int32_t>(top >> 32), index, place, key == top};
  }

  // The slot on rank u that can hand most copies to `level`, then the lowest index in order.
  ISOLOAD_HD Pick widest(int u, const RankSet<W>& level) {
    int64_t most = -1;
    int place = -1;
    team_.for_each(in_.S, [&](int s) {
      const int p = u * in_.S + s, i = t_.split[p];
      if (i < 0 || quota_[p] == 0 || !ws_.holders[i].meets(level)) return;
      if (const int64_t k = key(quota_[p], i); k > most) most = k, place = p;
    });
    return best(most, place);
  }

  // The rank in `level` that holds the expert `split` of the order: the lowest, or where paths end the one
  // with most room (ties to the lowest).
  ISOLOAD_HD Pick pick_replica(int split, const RankSet<W>& level, bool last_hop) {
    const int first = ws_.split.first[split], last = ws_.split.last[split];
    int64_t most = -1;
    int place = -1;
    team_.for_each(last - first, [&](int i) {
      const int r = t_.ranks[first + i], slot = t_.slots[first + i];
      if (!level.contains(r)) return;
      if (const int64_t k = key(last_hop ? room(r) : 0, r); k > most) most = k, place = slot;
    });
    return best(most, place);
  }
  ISOLOAD_HD int32_t room(int r) const { return ws_.cap[r] - ws_.load[r]; }

  // Along hop k. No other hop is of the same expert: it would have been a shorter way.
  ISOLOAD_HD void move(int k, int32_t copies) {
    int32_t &left = quota_[ws_.from[k]], &taken = quota_[ws_.to[k]];
    RankSet<W>& givers = ws_.givers[ws_.via[k]];
    left -= copies, taken += copies;
    if (left == 0) givers.erase(ws_.way[k + 1]);
    givers.insert(ws_.way[k]);
  }

  Team& team_;
  const ExactProblem& in_;
  const ReplicaTables t_;
  const ExactWorkspace<W> ws_;
  int32_t* const quota_;
  const int num_split_;
  Kept sides_;
  int source_ = 0;  // of the next path
};

}  // namespace isoload
