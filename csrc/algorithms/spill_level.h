// spill_level: one try to bring every rank's load down to a level where spare slots are scarce.
//
// The largest expert of any rank above the level goes, whole if there is room, to the rank with most room
// below it. So every spare slot carries as many copies as it can: an expert leaves whole even if less of it
// is above the level, for the room that this leaves on its rank serves the next expert, in that rank's own
// spare slots. What of this was not needed goes back in the end.
#pragma once

#include <cstdint>

#include "algorithms/spill_open.h"
#include "algorithms/spill_problem.h"
#include "host_device.h"

namespace isoload {

// What all levels of one layer share.
struct SpillQueue {
  int n;
  const int32_t* slots;  // [n] resident slots of the ranks that may lend, most copies first, then the lowest
  const int32_t* free;   // [R] spare slots that may be filled
  const int32_t* spare;  // [R * spare] all spare slots, the last one first
};

template <class Group>
class SpillLevel {
 public:
  ISOLOAD_HD SpillLevel(Group& group, const SpillView& view, const SpillState& state, int32_t level,
                        const SpillQueue& queue)
      : group_(group), in_(view), to_(state), open_(group, view, state), queue_(queue), level_(level) {}

  // Returns the largest load.
  ISOLOAD_HD int32_t run() {
    begin(group_, in_, to_, queue_.free);
    int32_t above = 0;
    group_.for_each(in_.R, [&](int r) { above += is_above(r); });
    open_.begin([&](int r) { return open_cost(to_.cost[r], to_.free[r]); });
    above_ = group_.sum32(above);
    group_.sync();
    const int n = queue_.n;
    ISOLOAD_ROLLED
    for (int i = 0; above_ > 0;) {
      i = group_.first(i, n, [&](int k) { return is_above(in_.rank[queue_.slots[k]]); });
      if (i == n && num_rests_ == 0) break;
      bool rest = num_rests_ > 0;
      if (rest) find_rest(), rest = i == n || rest_key_ > key(queue_.slots[i]);
      const int from = rest ? take_rest() : queue_.slots[i++];
      const Answer answer = offer(from);
      if (answer == Answer::full && !in_.within) break;
      if (answer == Answer::rest) add_rest(from);
    }
    return largest_cost(group_, in_, to_);
  }

  ISOLOAD_HD int32_t copies_above() const {
    int32_t copies = 0;
    group_.for_each(in_.R, [&](int r) { copies += to_.cost[r] > level_ ? to_.cost[r] - level_ : 0; });
    return group_.sum32(copies);  // none of them has taken any, so there are no more than all copies
  }

  // Copies go back as far as the rank they are from has room below `largest`, first where that saves an
  // import. The last rank's imports come first.
  ISOLOAD_HD void take_back(int32_t largest) {
    const int n = in_.R * in_.spare;
    ISOLOAD_ROLLED
    for (bool whole = true;; whole = false) {
      ISOLOAD_ROLLED
      for (int i = 0;; ++i) {
        i = group_.first(i, n, [&](int k) { return copies_back(queue_.spare[k], largest, whole) > 0; });
        if (i == n) break;
        const int p = queue_.spare[i];
        const int32_t copies = copies_back(p, largest, whole);
        group_.sync();  // all have read what is written here
        if (group_.rank() == 0) move_back(p, copies, whole);
        group_.sync();
      }
      if (!whole) break;
    }
    group_.sync();  // all have looked at all imports
    group_.for_each(in_.R, [&](int r) { close_up(r); });
  }

 private:
  enum class Answer { gone, rest, full };  // nothing is left to be offered; a rest is; no rank may take any

  ISOLOAD_HD int32_t price(int owner, int r) const { return in_.import_cost(in_.near(owner, r)); }
  ISOLOAD_HD bool is_above(int r) const { return to_.cost[r] > level_; }

  // How many of a spare slot's copies may go back: all or none of a whole import, else some of it.
  ISOLOAD_HD int32_t copies_back(int p, int32_t largest, bool whole) const {
    const int r = in_.rank[p], end = r * in_.S + in_.S;
    if (p < end - queue_.free[r] || p >= end - to_.free[r]) return 0;
    const int32_t here = to_.quota[p], room = largest - to_.cost[in_.rank[to_.lender[p]]];
    if (whole) return room < here ? 0 : here;
    const int32_t most = here - in_.min_chunk;
    return room < most ? room : most;
  }
  ISOLOAD_HD void move_back(int p, int32_t copies, bool whole) const {
    const int r = in_.rank[p], home = to_.lender[p], giver = in_.rank[home];
    const int32_t paid = whole ? price(in_.owner(in_.slot_to_expert[home]), r) : 0;
    to_.quota[p] -= copies, to_.cost[r] -= copies + paid;
    to_.quota[home] += copies, to_.cost[giver] += copies;
  }

  // Offers a slot's copies to the roomiest rank.
  ISOLOAD_HD Answer offer(int from) {
    const int giver = in_.rank[from];
    const int32_t here = to_.quota[from], given = to_.cost[giver];
    if (given <= level_ || here < in_.min_chunk) return Answer::gone;
    const int e = in_.slot_to_expert[from], owner = in_.replicated ? in_.owner(e) : giver;
    const OpenRank taker = open_.least(in_.group(owner));
    if (taker.rank < 0) return Answer::full;
    const int r = taker.rank, free = to_.free[r], exports = to_.exports[owner];
    const int held = in_.held(e, r, to_.lender, queue_.free[r], free);
    const int32_t paid = held < 0 ? price(owner, r) : 0;
    const int32_t room = level_ - taker.cost - paid;
    const int32_t copies = here < room ? here : room;
    if (copies < in_.min_chunk || (held < 0 && exports == in_.egress)) return Answer::gone;
    const int32_t kept = given - copies, cost = taker.cost + paid + copies;
    group_.sync();  // all have read what is written here
    if (group_.rank() == 0) {
      if (held < 0) {
        const int slot = r * in_.S + in_.S - free;
        to_.lender[slot] = from, to_.quota[slot] = copies;
        to_.free[r] = free - 1, to_.exports[owner] = exports + 1;
      } else {
        to_.quota[held] += copies;
      }
      to_.quota[from] = here - copies, to_.cost[giver] = kept, to_.cost[r] = cost;
      open_.raise(r, taker.at, open_cost(cost, free - (held < 0)));
      open_.join(giver, open_cost(kept, to_.free[giver]));
    }
    group_.sync();
    above_ -= kept <= level_;
    return copies < here ? Answer::rest : Answer::gone;
  }

  // Orders slots: most copies first, then the lowest.
  ISOLOAD_HD int64_t key(int p) const { return (int64_t(to_.quota[p]) << 32) - p; }
  ISOLOAD_HD void find_rest() {
    if (rest_ < 0) rest_key_ = group_.largest(num_rests_, [&](int k) { return key(to_.rests[k]); }, rest_);
  }
  ISOLOAD_HD int take_rest() {
    const int from = to_.rests[rest_], last = to_.rests[--num_rests_];
    group_.sync();  // all have read what is written here
    if (group_.rank() == 0) to_.rests[rest_] = last;
    group_.sync();
    rest_ = -1;
    return from;
  }
  ISOLOAD_HD void add_rest(int from) {
    const int64_t mine = key(from);
    if (num_rests_ == 0 || (rest_ >= 0 && mine > rest_key_)) rest_ = num_rests_, rest_key_ = mine;
    if (group_.rank() == 0) to_.rests[num_rests_] = from;
    ++num_rests_;
    group_.sync();
  }

  ISOLOAD_HD int32_t open_cost(int32_t cost, int32_t free) const {
    return free > 0 && cost < level_ ? cost : kClosed;
  }

  // A rank's imports without those that are empty, in the first spare slots.
  ISOLOAD_HD void close_up(int r) const {
    const int end = r * in_.S + in_.S;
    int kept = end - queue_.free[r];
    ISOLOAD_ROLLED
    for (int p = kept; p < end - to_.free[r]; ++p) {
      if (to_.quota[p] == 0) {
        group_.add(&to_.exports[in_.owner(in_.slot_to_expert[to_.lender[p]])], -1);
        continue;
      }
      const int32_t copies = to_.quota[p];
      to_.quota[p] = 0;
      to_.quota[kept] = copies, to_.lender[kept++] = to_.lender[p];
    }
    to_.free[r] = end - kept;
  }

  Group& group_;
  const SpillView& in_;
  const SpillState to_;
  const OpenRanks<Group> open_;
  const SpillQueue& queue_;
  const int32_t level_;
  int above_ = 0;         // ranks above the level
  int num_rests_ = 0;     // of slots that were cut
  int rest_ = -1;         // the largest of them, or -1: not found yet
  int64_t rest_key_ = 0;  // of that
};

}  // namespace isoload
