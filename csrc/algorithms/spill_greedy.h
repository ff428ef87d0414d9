// spill_greedy: one try to bring every rank's cost down to a target by handing copies to other ranks.
//
// The busiest rank first, of its experts always the largest: the chunk goes to the rank that takes most of
// it, of several to the fullest, which keeps the roomy ranks for larger chunks. A rank's cost is its copies
// plus what its imports cost it. Givers end at the target or above and takers at the target or below, and a
// rank is full after a chunk that its room cut short: it never gets an expert twice. Where the roomy ranks
// have no spare slot left, a giver that lends to one of them lends more of the same expert and takes the
// chunk itself: a relay costs one import, as a direct chunk does.
//
// A group of lanes makes a try: together they look at slots and ranks, the first writes.
#pragma once

#include <cstdint>

#include "algorithms/spill_open.h"
#include "algorithms/spill_problem.h"
#include "host_device.h"

namespace isoload {

template <class Group>
class SpillGreedy {
 public:
  ISOLOAD_HD SpillGreedy(Group& group, const SpillView& view, const SpillState& state, int32_t target)
      : group_(group), in_(view), to_(state), open_(group, view, state), target_(target) {}

  // free: [R] spare slots that may be filled. Returns the largest cost; or, as soon as a rank cannot get
  // below `limit`, that rank's, for this try is no use then: no later step lowers what was given up.
  ISOLOAD_HD int32_t run(const int32_t* free, int32_t slack, int32_t limit) {
    spare_ = free;
    begin(group_, in_, to_, free);
    if (!in_.replicated) open_.begin([&](int r) { return open_cost(to_.cost[r], to_.free[r]); });
    group_.sync();
    ISOLOAD_ROLLED
    for (int i = 0; i < in_.R && in_.load[in_.order[i]] > target_; ++i) {
      const int giver = in_.order[i];
      relieve(giver, slack);
      if (to_.cost[giver] >= limit) return to_.cost[giver];
    }
    return largest_cost(group_, in_, to_);
  }

  ISOLOAD_HD int32_t flags() const { return flags_; }

 private:
  struct Chunk {
    int32_t copies;
    int taker, slot;  // rank; slot in which it holds the expert, or -1
    bool near;
    int at;  // of an open rank; else -1
  };
  struct Relay {
    int32_t copies;
    int through;  // a spare slot, or -1
  };

  ISOLOAD_HD void relieve(int giver, int32_t slack) {
    const int first = giver * in_.S;
    while (to_.cost[giver] > target_) {
      const int32_t excess = to_.cost[giver] - target_;
      if (excess < in_.min_excess) {  // not worth an import
        if (excess > slack) flags_ |= kSmallExcess;
        return;
      }
      int s;
      const int32_t here = group_.largest(in_.S, [&](int i) { return to_.quota[first + i]; }, s);
      if (here == 0) {  // what is left cannot move: shared experts
        flags_ |= kImmovable;
        return;
      }
      const int e = in_.replicated ? in_.slot_to_expert[first + s] : -1;
      const int owner = in_.replicated ? in_.owner(e) : giver;
      const int32_t wanted = here < excess ? here : excess;
      Chunk chunk = choose(owner, e, wanted);
      if (chunk.copies < in_.min_chunk && excess <= slack) return;  // the tail stays at home
      if (chunk.copies == 0) chunk = relay(giver, wanted);
      if (chunk.copies == 0) {
        flags_ |= to_.exports[owner] == in_.egress ? kEgressLimit : kNoSpareSlot;
        return;
      }
      give(owner, giver, first + s, chunk);
    }
  }

  // The largest chunk near the expert's owner, or a far one where the near one is small.
  ISOLOAD_HD Chunk choose(int owner, int e, int32_t wanted) const {
    const bool all = in_.per_node == in_.R;
    const int first = all ? 0 : in_.node[owner] * in_.per_node, last = all ? 0 : first + in_.per_node;
    Chunk other{0, -1, -1, true, -1};
    ISOLOAD_ROLLED
    for (bool near = true;; near = false) {
      const Chunk chunk = among(owner, e, wanted, {first, last, near && !all}, near);
      if (!near) return other.copies >= chunk.copies ? other : chunk;
      if (all || chunk.copies == wanted || chunk.copies >= in_.min_chunk) return chunk;
      other = chunk;
    }
  }

  ISOLOAD_HD bool lends(int owner, bool near) const {
    return to_.exports[owner] < in_.egress && (near || !in_.within);
  }

  // The largest chunk that one of the ranks takes, of several the fullest, then the lowest.
  ISOLOAD_HD Chunk among(int owner, int e, int32_t wanted, Ranks ranks, bool near) const {
    const bool may_lend = lends(owner, near);
    if (in_.replicated) return among_holders(e, wanted, ranks, near, may_lend);
    if (!may_lend) return {0, -1, -1, near, -1};
    const int32_t limit = target_ - in_.import_cost(near);
    const OpenRank taker = open_.find(limit, wanted, ranks);
    if (taker.rank < 0) return {0, -1, -1, near, -1};  // whose cost is none to reckon with
    const int32_t room = limit - taker.cost, copies = room < wanted ? room : wanted;
    return {copies > 0 ? copies : 0, taker.rank, -1, near, taker.at};
  }

  // Where ranks may hold a replica, which needs no import: most copies first, then the fullest.
  ISOLOAD_HD Chunk among_holders(int e, int32_t wanted, Ranks ranks, bool near, bool may_lend) const {
    const int first = ranks.begin();
    int i, mine = -1;  // of this lane's best
    int64_t most = 0;
    const int64_t best = group_.largest(
        ranks.end(in_.R) - first,
        [&](int k) {
          const int r = first + k;
          int32_t room = target_ - to_.cost[r];
          if (room <= 0 || !ranks.has(r)) return int64_t(0);
          const int slot = held(e, r);
          if (slot < 0) room = may_lend && to_.free[r] > 0 ? room - in_.import_cost(near) : 0;
          const int32_t copies = room < wanted ? room : wanted;
          const int64_t key = copies > 0 ? int64_t(copies) << 32 | to_.cost[r] : 0;
          if (key > most) most = key, mine = slot;
          return key;
        },
        i);
    return {static_cast<int32_t>(best >> 32), first + i, group_.from_lane_of(i, mine), near, -1};
  }
  ISOLOAD_HD int held(int e, int r) const { return in_.held(e, r, to_.lender, spare_[r], to_.free[r]); }

  // Room for the largest chunk on a giver whose taker has room, but no slot, left. Once there is none, none
  // is sought: the search would take longer than all else.
  ISOLOAD_HD ISOLOAD_COLD Chunk relay(int home, int32_t wanted) {
    if (in_.replicated || !relays_ || !lends(home, true)) return {0, -1, -1, false, -1};
    Relay mine{0, -1};  // of this lane's ranks so far
    int r;
    const int32_t copies = group_.largest(
        in_.R,
        [&](int k) {
          mine = relayed(home, wanted, k, mine);
          return mine.copies;
        },
        r);
    relays_ = copies > 0;
    if (!relays_) return {0, -1, -1, false, -1};
    const int through = group_.from_lane_of(r, mine.through), lender = to_.lender[through];
    const int giver = in_.rank[lender];
    const bool near = in_.near(giver, home);
    const int32_t more = copies + in_.import_cost(near);
    group_.sync();  // all have read what is written here
    if (group_.rank() == 0) {
      to_.quota[lender] -= more, to_.cost[giver] -= more;
      to_.quota[through] += more, to_.cost[r] += more;
    }
    return {copies, giver, -1, near, -1};
  }

  // The largest chunk that fits if the rank takes more through one of its spare slots, or `best`.
  ISOLOAD_HD Relay relayed(int home, int32_t wanted, int r, Relay best) const {
    const int32_t room = target_ - to_.cost[r], least_cost = in_.least_import_cost();
    if (to_.free[r] > 0 || room <= least_cost + best.copies || best.copies == wanted) return best;
    ISOLOAD_ROLLED
    for (int p = r * in_.S + in_.S - spare_[r]; p < r * in_.S + in_.S; ++p) {
      const int32_t left = to_.quota[to_.lender[p]];
      const int32_t more = room < left ? room : left;
      if (more - least_cost <= best.copies) continue;
      const int giver = in_.rank[to_.lender[p]];
      if (giver == home || to_.free[giver] == 0) continue;
      const bool near = in_.near(giver, home);
      if (!near && in_.within) continue;
      const int32_t here = more - in_.import_cost(near), copies = here < wanted ? here : wanted;
      if (copies > best.copies) best = {copies, p};
    }
    return best;
  }

  ISOLOAD_HD void give(int owner, int giver, int from, const Chunk& chunk) const {
    group_.sync();             // all have read what is written here
    if (group_.rank() == 0) {  // loads first: a store between would end their overlap
      const int r = chunk.taker;
      const int32_t copies = chunk.copies;
      const int32_t kept = to_.cost[giver] - copies, rest = to_.quota[from] - copies;
      int32_t cost = to_.cost[r] + copies, free = to_.free[r];
      if (chunk.slot < 0) {
        const int32_t exports = to_.exports[owner] + 1;
        const int slot = r * in_.S + in_.S - free--;
        cost += in_.import_cost(chunk.near);
        to_.exports[owner] = exports, to_.free[r] = free;
        to_.lender[slot] = from, to_.quota[slot] = copies;
      } else {
        to_.quota[chunk.slot] += copies;
      }
      to_.cost[giver] = kept, to_.quota[from] = rest, to_.cost[r] = cost;
      if (chunk.at >= 0) open_.raise(r, chunk.at, open_cost(cost, free));
    }
    group_.sync();
  }

  // What orders a rank among those that may fill a spare slot; nothing else changes it but what it takes.
  ISOLOAD_HD int32_t open_cost(int32_t cost, int32_t free) const {
    return free > 0 && target_ - cost > in_.least_import_cost() ? cost : kClosed;
  }

  Group& group_;
  const SpillView& in_;
  const SpillState to_;
  const OpenRanks<Group> open_;
  const int32_t target_;
  const int32_t* spare_ = nullptr;  // [R] spare slots that may be filled
  bool relays_ = true;              // whether there may be one
  int32_t flags_ = 0;
};

}  // namespace isoload
