// spill_greedy: one try to bring every rank's cost down to a target by handing copies to other ranks.
//
// The busiest rank first, of its experts always the largest: the chunk goes to the rank that takes most of
// it, of several to the fullest, which keeps the roomy ranks for larger chunks. A rank's cost is its copies
// plus what its imports cost it. Givers end at the target or above and takers at the target or below, and a
// rank is full after a chunk that its room cut short: it never gets an expert twice. Where the roomy ranks
// have no spare slot left, a giver that lends to one of them lends more of the same expert and takes the
// chunk itself: a relay costs one import, as a direct chunk does.
#pragma once

#include <cstdint>

#include "algorithms/spill_view.h"
#include "host_device.h"

namespace isoload {

class SpillGreedy {
 public:
  ISOLOAD_HD SpillGreedy(const SpillView& view, const SpillState& state, int64_t target)
      : in_(view), to_(state), target_(target) {}

  // free: [R] spare slots that may be filled. Returns the largest cost; or, as soon as a rank cannot get
  // below `limit`, that rank's, for this try is no use then: no later step lowers what was given up.
  ISOLOAD_HD int64_t run(const int32_t* free, int64_t slack, int64_t limit) {
    spare_ = free;
    begin(in_, to_, free);
    for (int i = 0; i < in_.R && !in_.replicated; ++i)
      if (const int r = in_.order[i]; may_take(r))
        to_.takers[num_takers_] = r, to_.filled[num_takers_++] = to_.cost[r];
    for (int i = 0; i < in_.R && in_.load[in_.order[i]] > target_; ++i) {
      const int giver = in_.order[i];
      relieve(giver, slack);
      if (to_.cost[giver] >= limit) return to_.cost[giver];
    }
    int32_t largest = 0;
    for (int r = 0; r < in_.R; ++r) largest = to_.cost[r] > largest ? to_.cost[r] : largest;
    return largest;
  }

  ISOLOAD_HD int32_t flags() const { return flags_; }

 private:
  struct Chunk {
    int64_t copies;
    int taker, slot;  // rank; slot in which it holds the expert, or -1
    bool near;
  };

  ISOLOAD_HD void relieve(int giver, int64_t slack) {
    while (to_.cost[giver] > target_) {
      const int64_t excess = to_.cost[giver] - target_;
      if (excess < in_.min_excess) {  // not worth an import
        if (excess > slack) flags_ |= kSmallExcess;
        return;
      }
      int largest = giver * in_.S;
      for (int p = largest + 1; p < giver * in_.S + in_.S; ++p)
        if (to_.quota[p] > to_.quota[largest]) largest = p;
      if (to_.quota[largest] == 0) {  // what is left cannot move: shared experts
        flags_ |= kImmovable;
        return;
      }
      const int e = in_.slot_to_expert[largest], owner = in_.owner(e);
      const int64_t here = to_.quota[largest];
      const int64_t wanted = here < excess ? here : excess;
      Chunk chunk = choose(owner, e, wanted);
      if (chunk.copies < in_.min_chunk && excess <= slack) return;  // the tail stays at home
      if (chunk.copies == 0) chunk = relay(giver, wanted);
      if (chunk.copies == 0) {
        flags_ |= to_.exports[owner] == in_.egress ? kEgressLimit : kNoSpareSlot;
        return;
      }
      give(owner, largest, chunk);
    }
  }

  // The largest chunk near the expert's owner, or a far one where the near one is small.
  ISOLOAD_HD Chunk choose(int owner, int e, int64_t wanted) const {
    const int first = owner / in_.per_node * in_.per_node, last = first + in_.per_node;
    const bool by_rank = in_.replicated || in_.per_node < in_.R;
    const Chunk near =
        by_rank ? among_ranks(owner, e, wanted, first, last, true) : among_takers(owner, wanted, 0, 0, true);
    if (near.copies == wanted || near.copies >= in_.min_chunk || in_.per_node == in_.R) return near;
    Chunk far;
    if (in_.replicated) {
      far = among_ranks(owner, e, wanted, 0, first, false);
      const Chunk other = among_ranks(owner, e, wanted, last, in_.R, false);
      if (other.copies > far.copies ||
          (other.copies && other.copies == far.copies && to_.cost[other.taker] > to_.cost[far.taker]))
        far = other;
    } else {
      far = among_takers(owner, wanted, first, last, false);
    }
    return near.copies >= far.copies ? near : far;
  }

  ISOLOAD_HD bool lends(int owner, bool near) const {
    return to_.exports[owner] < in_.egress && (near || !in_.within);
  }

  // The largest chunk that one of the ranks takes, of several the fullest, then the lowest.
  ISOLOAD_HD Chunk among_ranks(int owner, int e, int64_t wanted, int from, int to, bool near) const {
    Chunk best{0, -1, -1, near};
    for (int r = from; r < to; ++r) {
      const int slot = in_.held(e, r, to_.lender, spare_[r], to_.free[r]);
      int64_t room = target_ - to_.cost[r];
      if (slot < 0) room = lends(owner, near) && to_.free[r] > 0 ? room - in_.import_cost[near] : 0;
      const int64_t copies = room < wanted ? room : wanted;
      if (copies > best.copies || (copies > 0 && copies == best.copies && to_.cost[r] > to_.cost[best.taker]))
        best = {copies, r, slot, near};
    }
    return best;
  }

  // The same among all takers but ranks from..to-1, if nobody holds a replica.
  ISOLOAD_HD Chunk among_takers(int owner, int64_t wanted, int from, int to, bool near) const {
    const Chunk none{0, -1, -1, near};
    if (!lends(owner, near)) return none;
    auto may = [&](int i) { return to_.takers[i] < from || to_.takers[i] >= to; };
    const int64_t limit = target_ - in_.import_cost[near];
    const int fits = num_fuller(limit - wanted);
    for (int i = fits; i < num_takers_; ++i)
      if (may(i)) return {wanted, to_.takers[i], -1, near};
    int best = fits - 1;
    while (best >= 0 && !may(best)) --best;
    if (best < 0 || to_.filled[best] >= limit) return none;
    for (int i = best; i >= 0 && to_.filled[i] == to_.filled[best]; --i)
      if (may(i)) best = i;
    return {limit - to_.filled[best], to_.takers[best], -1, near};
  }

  // Room for the largest chunk on a giver whose taker has room, but no slot, left. Once there is none, none
  // is sought: the search would take longer than all else.
  ISOLOAD_HD Chunk relay(int home, int64_t wanted) {
    Chunk best{0, -1, -1, false};
    if (in_.replicated || !relays_ || !lends(home, true)) return best;
    const int64_t least_cost = in_.least_import_cost();
    int through = -1;
    for (int r = 0; r < in_.R && best.copies < wanted; ++r) {
      const int64_t room = target_ - to_.cost[r];
      if (to_.free[r] > 0 || room - least_cost <= best.copies) continue;
      for (int p = r * in_.S + in_.S - spare_[r]; p < r * in_.S + in_.S; ++p) {
        const int32_t left = to_.quota[to_.lender[p]];
        const int64_t more = room < left ? room : left;
        if (more - least_cost <= best.copies) continue;
        const int giver = to_.lender[p] / in_.S;
        if (giver == home || to_.free[giver] == 0) continue;
        const bool near = giver / in_.per_node == home / in_.per_node;
        if (!near && in_.within) continue;
        const int64_t here = more - in_.import_cost[near], copies = here < wanted ? here : wanted;
        if (copies > best.copies) best = {copies, giver, -1, near}, through = p;
      }
    }
    relays_ = best.copies > 0;
    if (!relays_) return best;
    const int32_t more = static_cast<int32_t>(best.copies + in_.import_cost[best.near]);
    to_.quota[to_.lender[through]] -= more, to_.cost[best.taker] -= more;
    to_.quota[through] += more, to_.cost[through / in_.S] += more;
    return best;
  }

  // How many takers cost more: those before the others.
  ISOLOAD_HD int num_fuller(int64_t cost) const {
    const int32_t level = cost < 0 ? -1 : static_cast<int32_t>(cost);
    int32_t fuller = 0;
    for (int i = 0; i < num_takers_; ++i) fuller += to_.filled[i] > level;
    return fuller;
  }

  ISOLOAD_HD void give(int owner, int from, const Chunk& chunk) {
    int slot = chunk.slot;
    const int r = chunk.taker;
    const int32_t copies = static_cast<int32_t>(chunk.copies), before = to_.cost[r];
    to_.cost[from / in_.S] -= copies;
    to_.cost[r] += copies;
    if (slot < 0) {
      slot = r * in_.S + in_.S - to_.free[r];
      --to_.free[r], ++to_.exports[owner];
      to_.cost[r] += static_cast<int32_t>(in_.import_cost[chunk.near]);
      to_.lender[slot] = from;
    }
    to_.quota[from] -= copies;
    to_.quota[slot] += copies;
    if (!in_.replicated) move_up(r, before);
  }

  // A taker that costs more than before comes earlier, or no more. A relay is by no taker.
  ISOLOAD_HD void move_up(int r, int32_t before) {
    int i = num_fuller(before);
    while (i < num_takers_ && to_.takers[i] != r) ++i;
    if (i == num_takers_) return;
    if (!may_take(r)) {
      for (--num_takers_; i < num_takers_; ++i)
        to_.takers[i] = to_.takers[i + 1], to_.filled[i] = to_.filled[i + 1];
      return;
    }
    const int32_t now = to_.cost[r];
    for (; i > 0 && (to_.filled[i - 1] < now || (to_.filled[i - 1] == now && to_.takers[i - 1] > r)); --i)
      to_.takers[i] = to_.takers[i - 1], to_.filled[i] = to_.filled[i - 1];
    to_.takers[i] = r, to_.filled[i] = now;
  }

  ISOLOAD_HD bool may_take(int r) const {
    const int64_t room = target_ - to_.cost[r];
    return in_.replicated ? room > 0 : to_.free[r] > 0 && room > in_.least_import_cost();
  }

  const SpillView& in_;
  const SpillState to_;
  const int64_t target_;
  const int32_t* spare_ = nullptr;  // [R] spare slots that may be filled
  int num_takers_ = 0;
  bool relays_ = true;  // whether there may be one
  int32_t flags_ = 0;
};

}  // namespace isoload
