// fill_level: one level of plan_fill. The largest copies on any rank above the level go, whole if they fit,
// to the roomiest rank below the level that has a free spare slot or holds the expert.
//
// An expert leaves whole even if less of it is above the level: its rank then has room for the next expert,
// in spare slots of its own, so that every spare slot carries as many copies as it can.
#pragma once

#include <cstdint>

#include "algorithms/fill_problem.h"
#include "host_device.h"

namespace isoload {

// The largest of n values, and the lowest place that has it. One lane alone looks twice, which a compiler
// turns into steps of several values.
template <class Group>
ISOLOAD_HD int32_t largest_of(const Group& group, const int32_t* values, int n, int& at) {
  if (Group::kLanes > 1) return group.largest(n, [&](int i) { return values[i]; }, at);
  int32_t most = values[0];
  for (int i = 1; i < n; ++i) most = values[i] > most ? values[i] : most;
  for (at = 0; values[at] != most;) ++at;
  return most;
}

template <class Group>
class FillLevel {
 public:
  struct Outcome {
    int32_t peak;
    int64_t cost;  // the peak, the imports of the busiest importer and the exports of the busiest exporter
  };

  ISOLOAD_HD FillLevel(Group& group, const LevelFillProblem& problem, const LevelFillWorkspace& workspace,
                       const FillQueue& queue)
      : group_(group), in_(problem), ws_(workspace), queue_(queue) {}

  // The outcome is lane 0's for certain; the experts are in `lent`.
  ISOLOAD_HD Outcome run(int32_t level) {
    level_ = level;
    begin();
    int next = 0, num_rests = 0;
    ISOLOAD_ROLLED
    while (above_ > 0 && open_ > 0) {
      next = group_.first(next, queue_.n, [&](int k) { return is_above(ws_.rank[ws_.queue[k]]); });
      int at = -1, from = next < queue_.n ? ws_.queue[next] : -1;
      if (num_rests > 0) {
        const int64_t rest = group_.largest(num_rests, [&](int k) { return key(ws_.rests[k]); }, at);
        if (from < 0 || rest > key(from))
          from = ws_.rests[at];
        else
          at = -1;
      }
      if (from < 0) break;
      if (at < 0) ++next;
      const int last = at < 0 ? -1 : ws_.rests[--num_rests];
      const bool rest = offer(from, at, last);
      if (rest && group_.rank() == 0) ws_.rests[num_rests] = from;
      num_rests += rest;
      group_.sync();
    }
    return outcome();
  }

  // The next level begins with the slots of the placement.
  ISOLOAD_HD void undo() const {
    const int spare = in_.spare;
    group_.for_each(in_.R * spare, [&](int i) {
      if (const int e = ws_.lent[i]; e >= 0 && queue_.replicated)
        ws_.holds[int64_t(e) * in_.R + i / spare] = false;
    });
    group_.sync();  // a lane may still read what the next level writes
  }

 private:
  ISOLOAD_HD bool is_above(int r) const { return ws_.load[r] - level_ >= in_.min_chunk; }
  ISOLOAD_HD bool is_open(int r) const { return ws_.free[r] > 0 && ws_.load[r] < level_; }
  // Orders slots: most copies first, then the lowest.
  ISOLOAD_HD int64_t key(int p) const { return (int64_t(ws_.of_level[p]) << 32) - p; }

  // The lowest slot of an expert on a rank that holds it.
  ISOLOAD_HD int slot_of(int e, int r) const {
    int p = r * in_.S;
    ISOLOAD_ROLLED
    while (p < (r + 1) * in_.S - in_.spare && in_.slot_to_expert[p] != e) ++p;
    ISOLOAD_ROLLED
    for (int i = r * in_.spare; p >= (r + 1) * in_.S - in_.spare && ws_.lent[i] != e; ++i) ++p;
    return p;
  }

  ISOLOAD_HD void begin() {
    const LevelFillWorkspace& ws = ws_;
    group_.for_each(in_.R * in_.S, [&](int p) { ws.of_level[p] = ws.copies[p]; });
    group_.for_each(in_.R * in_.spare, [&](int i) { ws.lent[i] = -1; });
    int32_t above = 0, open = 0;
    group_.for_each(in_.R, [&](int r) {
      ws.load[r] = ws.first_load[r], ws.imported[r] = ws.exported[r] = 0;
      ws.free[r] = !in_.alive || in_.alive[r] ? in_.spare : 0;
      ws.room[r] = ws.free[r] > 0 ? level_ - ws.load[r] : -1;
      above += is_above(r), open += is_open(r);
    });
    above_ = group_.sum32(above), open_ = group_.sum32(open);
    group_.sync();
  }

  ISOLOAD_HD bool is_near(int r, int first) const { return r >= first && r < first + in_.per_node; }

  // The rank with most room for copies of an expert besides what its import costs, of several the lowest, and
  // how much. first: of the node of its home slot. Without replicas no rank with room holds the expert: one
  // that has taken a part of its copies is at the level.
  ISOLOAD_HD int32_t taker(int e, int first, int& r) const {
    const int32_t near_cost = in_.near_import, far_cost = in_.far_import;
    if (queue_.replicated || far_cost < near_cost) {
      return group_.largest(
          in_.R,
          [&](int q) -> int32_t {
            const int32_t room = level_ - ws_.load[q];
            if (queue_.replicated && ws_.holds[int64_t(e) * in_.R + q]) return room;
            const bool near = is_near(q, first);
            if (room <= 0 || ws_.free[q] == 0 || (in_.within && !near)) return -1;
            return room - (near ? near_cost : far_cost);
          },
          r);
    }
    int at = 0;
    const int32_t all = in_.within ? -1 : largest_of(group_, ws_.room, in_.R, r);
    if (!in_.within && (near_cost == far_cost || is_near(r, first))) return all - near_cost;
    const int32_t near = largest_of(group_, ws_.room + first, in_.per_node, at) - near_cost;
    if (!in_.within && all > 0 && (all - far_cost > near || (all - far_cost == near && r < first + at)))
      return all - far_cost;
    r = first + at;
    return near;
  }

  // Moves copies of a slot, after the rest at `at` gave its place to `last`. Whether some are left to be
  // offered. A barrier must follow: lane 0 writes.
  ISOLOAD_HD bool offer(int from, int at, int last) {
    const int giver = ws_.rank[from], e = in_.slot_to_expert[from], owner = ws_.owner[e];
    const int first = in_.per_node < in_.R ? owner / in_.per_node * in_.per_node : 0;
    int r = 0;
    const int32_t gain = is_above(giver) ? taker(e, first, r) : -1;
    const bool near = is_near(r, first), held = queue_.replicated && ws_.holds[int64_t(e) * in_.R + r];
    const int32_t free = ws_.free[r], here = ws_.of_level[from];
    const int32_t cost_in = held ? 0 : near ? in_.near_import : in_.far_import;
    const int32_t cost_out = held ? 0 : near ? in_.near_export : in_.far_export;
    const int32_t room = gain + cost_in, copies = here < room ? here : room;
    const bool pays = gain > 0 && copies > cost_in && copies > cost_out;
    const int32_t left = ws_.load[giver] - copies, more = ws_.load[r] + copies;
    if (pays) {
      above_ -= left - level_ < in_.min_chunk;
      open_ +=
          (left < level_ && ws_.free[giver] > 0) - (free > 0 && (more == level_ || (!held && free == 1)));
    }
    group_.sync();  // all have read what is written here
    if (group_.rank() == 0) {
      if (at >= 0) ws_.rests[at] = last;
      if (pays) {
        const int to = held ? slot_of(e, r) : (r + 1) * in_.S - free;
        if (!held) {
          ws_.lent[(r + 1) * in_.spare - free] = e, ws_.of_level[to] = 0;
          if (queue_.replicated) ws_.holds[int64_t(e) * in_.R + r] = true;
          ws_.free[r] = free - 1, ws_.imported[r] += cost_in, ws_.exported[owner] += cost_out;
        }
        ws_.of_level[to] += copies, ws_.of_level[from] = here - copies;
        ws_.load[r] = more, ws_.room[r] = ws_.free[r] > 0 ? level_ - more : -1;
        ws_.load[giver] = left;
        if (ws_.free[giver] > 0) ws_.room[giver] = level_ - left;
      }
    }
    return pays && copies < here;
  }

  ISOLOAD_HD Outcome outcome() const {
    int32_t peak = 0, most_in = 0, most_out = 0;
    group_.for_each(in_.R, [&](int r) {
      peak = ws_.load[r] > peak ? ws_.load[r] : peak;
      most_in = ws_.imported[r] > most_in ? ws_.imported[r] : most_in;
      most_out = ws_.exported[r] > most_out ? ws_.exported[r] : most_out;
    });
    peak = group_.max32(peak), most_in = group_.max32(most_in), most_out = group_.max32(most_out);
    return {peak, int64_t(peak) + most_in + most_out};
  }

  Group& group_;
  const LevelFillProblem& in_;
  const LevelFillWorkspace& ws_;
  const FillQueue& queue_;
  int32_t level_ = 0;
  int above_ = 0, open_ = 0;  // ranks above the level; ranks below it with a free spare slot
};

}  // namespace isoload
