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

// What all levels of one layer share.
struct SpillQueue {
  int n;
  const int32_t* slots;  // [n] resident slots of the ranks that may lend, most copies first, then the lowest
  const int32_t* giver;  // [P] the rank of each slot
  const int64_t* roomy;  // [R] load_key of the ranks that may take, the least first, then INT64_MAX; by group
  const int32_t* free;   // [R] spare slots that may be filled
};

// Orders ranks by cost, then number: the cost above 16 bits for the rank.
ISOLOAD_HD inline int64_t load_key(int32_t cost, int r) { return int64_t(cost) << 16 | r; }

class SpillLevel {
 public:
  ISOLOAD_HD SpillLevel(const SpillView& view, const SpillState& state, int64_t level,
                        const SpillQueue& queue)
      : in_(view), to_(state), queue_(queue), level_(level) {}

  // Returns the largest load.
  ISOLOAD_HD int64_t run() {
    begin(in_, to_, queue_.free);
    for (int g = 0; g < in_.num_groups(); ++g) to_.takers[g] = to_.filled[g] = 0;
    for (int r = 0; r < in_.R; ++r) above_ += to_.cost[r] > level_;
    const int n = queue_.n;
    int i = 0, first = 0, last = 0;  // the next slot, and rests of those that were cut
    while (above_ > 0 && (i < n || first < last)) {
      const bool rest = first < last && (i == n || precedes(to_.rests[first], queue_.slots[i]));
      const int from = rest ? to_.rests[first++] : queue_.slots[i++];
      const Answer answer = offer(from);
      if (answer == Answer::full && !in_.within) break;
      if (answer != Answer::rest) continue;
      int k = last++;
      for (; k > first && precedes(from, to_.rests[k - 1]); --k) to_.rests[k] = to_.rests[k - 1];
      to_.rests[k] = from;
    }
    int32_t largest = 0;
    for (int r = 0; r < in_.R; ++r) largest = to_.cost[r] > largest ? to_.cost[r] : largest;
    return largest;
  }

  ISOLOAD_HD int64_t copies_above() const {
    int64_t copies = 0;
    for (int r = 0; r < in_.R; ++r) copies += to_.cost[r] > level_ ? to_.cost[r] - level_ : 0;
    return copies;
  }

  // Copies go back as far as the rank they are from has room below `largest`, first where that saves an
  // import.
  ISOLOAD_HD void take_back(int64_t largest) {
    for_each_import(largest, [&](int p, int64_t here, int64_t room) {
      if (room < here) return;
      move(p, p / in_.S, to_.lender[p], to_.lender[p] / in_.S, static_cast<int32_t>(here));
      to_.cost[p / in_.S] -= price(in_.owner(in_.slot_to_expert[to_.lender[p]]), p / in_.S);
    });
    for_each_import(largest, [&](int p, int64_t here, int64_t room) {
      const int64_t most = here - in_.min_chunk, back = room < most ? room : most;
      if (back > 0) move(p, p / in_.S, to_.lender[p], to_.lender[p] / in_.S, static_cast<int32_t>(back));
    });
    for (int r = 0; r < in_.R; ++r) close_up(r);
  }

 private:
  enum class Answer { gone, rest, full };  // nothing is left to be offered; a rest is; no rank may take any

  ISOLOAD_HD int32_t price(int owner, int r) const {
    const bool near = in_.per_node == in_.R || owner / in_.per_node == r / in_.per_node;
    return static_cast<int32_t>(in_.import_cost[near]);
  }

  // f(slot, copies, room below `largest` on the rank they are from) of every import, the last rank's first.
  template <class F>
  ISOLOAD_HD void for_each_import(int64_t largest, F&& f) {
    for (int r = in_.R - 1; r >= 0; --r) {
      const int end = r * in_.S + in_.S;
      for (int p = end - to_.free[r] - 1; p >= end - queue_.free[r]; --p)
        f(p, int64_t(to_.quota[p]), largest - to_.cost[to_.lender[p] / in_.S]);
    }
  }

  // Offers a slot's copies to the roomiest rank.
  ISOLOAD_HD Answer offer(int from) {
    const int giver = queue_.giver[from], e = in_.slot_to_expert[from];
    const int64_t here = to_.quota[from];
    if (to_.cost[giver] <= level_ || here < in_.min_chunk) return Answer::gone;
    const int owner = in_.replicated ? in_.owner(e) : giver, g = in_.group(owner);
    const int64_t fresh = fresh_taker(g), other = to_.filled[g] > 0 ? to_.heap[g * in_.per_node] : INT64_MAX;
    const int64_t taker = fresh < other ? fresh : other;
    if (taker == INT64_MAX) return Answer::full;
    const int r = static_cast<int>(taker & 0xffff);
    int slot = in_.held(e, r, to_.lender, queue_.free[r], to_.free[r]);
    const int32_t paid = slot < 0 ? price(owner, r) : 0;
    const int64_t room = level_ - to_.cost[r] - paid, copies = here < room ? here : room;
    if (copies < in_.min_chunk || (slot < 0 && to_.exports[owner] == in_.egress)) return Answer::gone;
    if (slot < 0) {
      slot = r * in_.S + in_.S - to_.free[r];
      --to_.free[r], ++to_.exports[owner], to_.cost[r] += paid;
      to_.lender[slot] = from;
    }
    move(from, giver, slot, r, static_cast<int32_t>(copies));
    above_ -= to_.cost[giver] <= level_;
    if (taker == fresh)
      ++to_.takers[g], join(r);
    else
      sink(g, r);
    join(giver);
    return copies < here ? Answer::rest : Answer::gone;
  }
  ISOLOAD_HD bool precedes(int p, int q) const {
    return to_.quota[p] > to_.quota[q] || (to_.quota[p] == to_.quota[q] && p < q);
  }

  ISOLOAD_HD void move(int from, int giver, int to, int taker, int32_t copies) {
    to_.quota[from] -= copies, to_.cost[giver] -= copies;
    to_.quota[to] += copies, to_.cost[taker] += copies;
  }

  // The key of the roomiest rank that has taken nothing yet, or INT64_MAX. Others are in a heap.
  ISOLOAD_HD int64_t fresh_taker(int g) const {
    const int k = to_.takers[g];
    const int64_t key = k < in_.group_size() ? queue_.roomy[g * in_.per_node + k] : INT64_MAX;
    return key < level_ << 16 ? key : INT64_MAX;
  }
  ISOLOAD_HD bool may_take(int r) const { return to_.free[r] > 0 && to_.cost[r] < level_; }

  ISOLOAD_HD void join(int r) {
    if (!may_take(r)) return;
    const int g = in_.group(r);
    int64_t *heap = to_.heap + g * in_.per_node, mine = load_key(to_.cost[r], r);
    int i = to_.filled[g]++;
    for (; i > 0 && mine < heap[(i - 1) / 2]; i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
    heap[i] = mine;
  }

  // The first has less room than before, or none.
  ISOLOAD_HD void sink(int g, int r) {
    int64_t* heap = to_.heap + g * in_.per_node;
    int32_t& n = to_.filled[g];
    const int64_t mine = may_take(r) ? load_key(to_.cost[r], r) : heap[--n];
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
    int kept = end - queue_.free[r];
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
  const SpillQueue& queue_;
  const int64_t level_;
  int above_ = 0;  // ranks above the level
};

}  // namespace isoload
