// spill_level: one try to bring every rank's load down to a level where spare slots are scarce.
//
// The largest expert of any rank above the level goes, whole if there is room, to the rank with most room
// below it. So every spare slot carries as many copies as it can: an expert leaves whole even if less of it
// is above the level, for the room that this leaves on its rank serves the next expert, in that rank's own
// spare slots. What of this was not needed goes back in the end.
#pragma once

#include <cstdint>

#include "algorithms/spill_view.h"
#include "host_device.h"

namespace isoload {

class SpillLevel {
 public:
  // queue: [n] resident slots of the ranks that may lend, most copies first, then the lowest slot. free: [R]
  // spare slots that may be filled.
  ISOLOAD_HD SpillLevel(const SpillView& view, const SpillState& state, int64_t level, const int32_t* queue,
                        int n, const int32_t* free)
      : in_(view), to_(state), level_(level), queue_(queue), spare_(free), n_(n) {}

  // Returns the largest load.
  ISOLOAD_HD int64_t run() {
    for (int p = 0; p < in_.R * in_.S; ++p) to_.quota[p] = in_.start[p];
    for (int r = 0; r < in_.R; ++r) to_.cost[r] = in_.load[r], to_.free[r] = spare_[r], to_.exports[r] = 0;
    for (int node = 0; node * size() < in_.R; ++node) to_.filled[node] = 0;
    for (int r = 0; r < in_.R; ++r) join(r);
    int i = 0, first = 0, last = 0;  // the next slot, and rests of those that were cut
    while ((i < n_ || first < last) && (in_.within || to_.filled[0] > 0)) {
      const bool rest = first < last && (i == n_ || precedes(to_.rests[first], queue_[i]));
      const int from = rest ? to_.rests[first++] : queue_[i++];
      if (!offer(from)) continue;
      int k = last++;
      for (; k > first && precedes(from, to_.rests[k - 1]); --k) to_.rests[k] = to_.rests[k - 1];
      to_.rests[k] = from;
    }
    int32_t largest = 0;
    for (int r = 0; r < in_.R; ++r) largest = to_.cost[r] > largest ? to_.cost[r] : largest;
    return largest;
  }

  // Copies go back as far as the rank they are from has room below `largest`, first where that saves an
  // import.
  ISOLOAD_HD void take_back(int64_t largest) {
    for_each_import(largest, [&](int p, int64_t here, int64_t room) {
      if (room < here) return;
      move(p, to_.lender[p], static_cast<int32_t>(here));
      to_.cost[p / in_.S] -= price(in_.owner(in_.slot_to_expert[to_.lender[p]]), p / in_.S);
    });
    for_each_import(largest, [&](int p, int64_t here, int64_t room) {
      const int64_t most = here - in_.min_chunk, back = room < most ? room : most;
      if (back > 0) move(p, to_.lender[p], static_cast<int32_t>(back));
    });
    for (int r = 0; r < in_.R; ++r) close_up(r);
  }

 private:
  ISOLOAD_HD int size() const { return in_.within ? in_.per_node : in_.R; }  // ranks that lend to each other

  ISOLOAD_HD int32_t price(int owner, int r) const {
    return static_cast<int32_t>(in_.import_cost[owner / in_.per_node == r / in_.per_node]);
  }

  // f(slot, copies, room below `largest` on the rank they are from) of every import, the last rank's first.
  template <class F>
  ISOLOAD_HD void for_each_import(int64_t largest, F&& f) {
    for (int r = in_.R - 1; r >= 0; --r) {
      const int end = r * in_.S + in_.S;
      for (int p = end - to_.free[r] - 1; p >= end - spare_[r]; --p)
        f(p, int64_t(to_.quota[p]), largest - to_.cost[to_.lender[p] / in_.S]);
    }
  }

  // Offers a slot's copies to the roomiest rank. Returns whether a rest is to be offered in its turn.
  ISOLOAD_HD bool offer(int from) {
    const int giver = from / in_.S, e = in_.slot_to_expert[from];
    const int64_t here = to_.quota[from];
    if (to_.cost[giver] <= level_ || here < in_.min_chunk) return false;
    const int owner = in_.owner(e), first = owner / size() * size();
    if (to_.filled[first / size()] == 0) return false;
    const int r = static_cast<int>(to_.heap[first] & 0xffff);
    int slot = in_.held(e, r, to_.lender, spare_[r], to_.free[r]);
    const int32_t paid = slot < 0 ? price(owner, r) : 0;
    const int64_t room = level_ - to_.cost[r] - paid, copies = here < room ? here : room;
    if (copies < in_.min_chunk || (slot < 0 && to_.exports[owner] == in_.egress)) return false;
    if (slot < 0) {
      slot = r * in_.S + in_.S - to_.free[r];
      --to_.free[r], ++to_.exports[owner], to_.cost[r] += paid;
      to_.lender[slot] = from;
    }
    move(from, slot, static_cast<int32_t>(copies));
    sink(first, r);
    join(giver);
    return copies < here;
  }
  ISOLOAD_HD bool precedes(int p, int q) const {
    return to_.quota[p] > to_.quota[q] || (to_.quota[p] == to_.quota[q] && p < q);
  }

  ISOLOAD_HD void move(int from, int to, int32_t copies) {
    to_.quota[from] -= copies, to_.cost[from / in_.S] -= copies;
    to_.quota[to] += copies, to_.cost[to / in_.S] += copies;
  }

  // Heaps of the ranks that may take copies, one per node if experts stay there: the least cost, then the
  // lowest rank, first. A key is both: the cost above 16 bits for the rank.
  ISOLOAD_HD int64_t key(int r) const { return int64_t(to_.cost[r]) << 16 | r; }
  ISOLOAD_HD bool may_take(int r) const { return to_.free[r] > 0 && to_.cost[r] < level_; }

  ISOLOAD_HD void join(int r) {
    if (!may_take(r)) return;
    const int first = r / size() * size();
    int64_t *heap = to_.heap + first, mine = key(r);
    int i = to_.filled[first / size()]++;
    for (; i > 0 && mine < heap[(i - 1) / 2]; i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
    heap[i] = mine;
  }

  // The first has less room than before, or none.
  ISOLOAD_HD void sink(int first, int r) {
    int64_t* heap = to_.heap + first;
    int32_t& n = to_.filled[first / size()];
    const int64_t mine = may_take(r) ? key(r) : heap[--n];
    int i = 0;
    for (int child = 1; child < n; child = 2 * i + 1) {
      child += child + 1 < n && heap[child + 1] < heap[child];
      if (mine < heap[child]) break;
      heap[i] = heap[child], i = child;
    }
    heap[i] = mine;
  }

  // A rank's imports without those that are empty, in the first spare slots.
  ISOLOAD_HD void close_up(int r) {
    const int end = r * in_.S + in_.S;
    int kept = end - spare_[r];
    for (int p = kept; p < end - to_.free[r]; ++p) {
      if (to_.quota[p] == 0) {
        --to_.exports[in_.owner(in_.slot_to_expert[to_.lender[p]])];
        continue;
      }
      const int32_t copies = to_.quota[p];
      to_.quota[p] = 0;
      to_.quota[kept] = copies, to_.lender[kept++] = to_.lender[p];
    }
    to_.free[r] = end - kept;
  }

  const SpillView& in_;
  const SpillState to_;
  const int64_t level_;
  const int32_t *const queue_, *const spare_;
  const int n_;
};

}  // namespace isoload
