// share: how many of each replica's quota come from each source rank. Every rank computes its own row from
// the gathered loads, so the whole group realises the quota exactly without a word between the ranks.
//
// Sources and replicas are laid on two number lines by prefix sums; a source sends to a replica what their
// intervals have in common. With locality this is done three times, on what the time before left over: a rank
// with itself, the ranks of one node, all ranks. Each level matches the most copies the quota permits, hence
// local and node-local copies are the most possible. Without it (rank_major) one pass over all ranks is made,
// which gives each replica one contiguous range of the expert's copies in source order.
#pragma once

#include <cstdint>

#include "algorithms/replica_tables.h"

namespace isoload {

struct ShareProblem {
  int R, E, S, ranks_per_node;
  ReplicaTables tables;
  const int32_t* loads;  // [R, E] copies per source rank and expert
  const int32_t* quota;  // [P]
  bool locality;
  int first_row, last_row;  // the source ranks whose share is wanted
};

// Caller's memory for one expert: 4 * R int32.
struct ShareWorkspace {
  int32_t *left, *room, *left_start, *room_start;  // [R] of the sources; [R] of the replicas (at most R)
  static ShareWorkspace at(int32_t* memory, int R) {
    return {memory, memory + R, memory + 2 * R, memory + 3 * R};
  }
};

// The part of [start, start + length) that lies in [other, other + size).
inline int32_t overlap(int32_t start, int32_t length, int32_t other, int32_t size) {
  const int32_t low = start > other ? start : other;
  const int32_t high = start + length < other + size ? start + length : other + size;
  return high > low ? high - low : 0;
}

// One expert's share for the wanted source ranks. loads: the expert's column, one source every `stride` ints.
template <class Team>
class ExpertShare {
 public:
  ExpertShare(Team& team, const ShareProblem& problem, int expert, const int32_t* loads, int stride,
              int32_t* out, ShareWorkspace workspace)
      : team_(team),
        in_(problem),
        t_(problem.tables),
        loads_(loads),
        stride_(stride),
        out_(out),
        ws_(workspace),
        first_(t_.offsets[expert]),
        copies_(t_.copies(expert)) {}

  // Adds to out [last_row - first_row, P], which the caller has zeroed. False if quota and loads disagree.
  bool run() {
    if (copies_ == 1) return send_all_to(t_.slots[first_]);
    int64_t difference = 0;
    team_.for_each(in_.R, [&](int s) { difference += ws_.left[s] = load(s); });
    team_.for_each(copies_, [&](int c) { difference -= ws_.room[c] = in_.quota[t_.slots[first_ + c]]; });
    if (team_.sum(difference) != 0) return false;
    if (in_.locality) {
      keep_at_home();
      const int per_node = in_.ranks_per_node;
      for (int c = 0; per_node < in_.R && c < copies_;) {
        const int node = rank(c) / per_node, begin = c;
        while (c < copies_ && rank(c) / per_node == node) ++c;
        match(node * per_node, (node + 1) * per_node, begin, c);
        settle(node * per_node, (node + 1) * per_node, begin, c);
      }
    }
    match(0, in_.R, 0, copies_);
    return true;
  }

 private:
  int32_t load(int s) const { return loads_[int64_t(s) * stride_]; }
  int rank(int c) const { return t_.ranks[first_ + c]; }
  bool wanted(int s) const { return s >= in_.first_row && s < in_.last_row; }
  int32_t& out(int s, int c) {
    return out_[int64_t(s - in_.first_row) * in_.R * in_.S + t_.slots[first_ + c]];
  }

  bool send_all_to(int slot) {
    int64_t excess = 0;
    team_.for_each(in_.last_row - in_.first_row, [&](int i) {
      const int32_t n = load(in_.first_row + i);
      out_[int64_t(i) * in_.R * in_.S + slot] = n;
      excess += n > in_.quota[slot];
    });
    return team_.sum(excess) == 0;
  }

  void keep_at_home() {
    team_.for_each(copies_, [&](int c) {
      const int s = rank(c);
      const int32_t n = ws_.left[s] < ws_.room[c] ? ws_.left[s] : ws_.room[c];
      ws_.left[s] -= n;
      ws_.room[c] -= n;
      if (wanted(s)) out(s, c) += n;
    });
    team_.sync();
  }

  // Sources [s0, s1) send to replicas [c0, c1): intervals of one number line each.
  void match(int s0, int s1, int c0, int c1) {
    team_.for_each(s1 - s0, [&](int i) { ws_.left_start[s0 + i] = ws_.left[s0 + i]; });
    team_.for_each(c1 - c0, [&](int i) { ws_.room_start[c0 + i] = ws_.room[c0 + i]; });
    team_.sync();
    sent_ = team_.scan(ws_.left_start + s0, s1 - s0);
    taken_ = team_.scan(ws_.room_start + c0, c1 - c0);
    const int begin = s0 > in_.first_row ? s0 : in_.first_row, end = s1 < in_.last_row ? s1 : in_.last_row;
    team_.for_each(end > begin ? end - begin : 0, [&](int i) {
      const int s = begin + i;
      for (int c = c0; c < c1; ++c)
        out(s, c) += overlap(ws_.left_start[s], ws_.left[s], ws_.room_start[c], ws_.room[c]);
    });
    team_.sync();
  }

  // Takes off what match() has sent: the number lines' common beginning.
  void settle(int s0, int s1, int c0, int c1) {
    team_.for_each(s1 - s0, [&](int i) {
      ws_.left[s0 + i] -= overlap(ws_.left_start[s0 + i], ws_.left[s0 + i], 0, taken_);
    });
    team_.for_each(c1 - c0, [&](int i) {
      ws_.room[c0 + i] -= overlap(ws_.room_start[c0 + i], ws_.room[c0 + i], 0, sent_);
    });
    team_.sync();
  }

  Team& team_;
  const ShareProblem& in_;
  const ReplicaTables t_;
  const int32_t* const loads_;
  const int stride_;
  int32_t* const out_;
  const ShareWorkspace ws_;
  const int first_, copies_;
  int32_t sent_ = 0, taken_ = 0;  // by the last match(): copies the sources had, copies the replicas wanted
};

}  // namespace isoload
