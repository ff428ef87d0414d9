// fill_level: one level of plan_fill. The largest copies on any rank above the level go, whole if they fit, to
// the roomiest rank below the level that has a free spare slot or holds the expert.
//
// An expert leaves whole even if less of it is above the level: its rank then has room for the next expert, in
// spare slots of its own, so that every spare slot carries as many copies as it can.
#pragma once

#include <cstdint>

#include "algorithms/fill_problem.h"
#include "host_device.h"

namespace isoload {

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
        if (from < 0 || rest > key(from)) from = ws_.rests[at];
        else at = -1;
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
      if (const int e = ws_.lent[i]; e >= 0) ws_.holds[int64_t(e) * in_.R + i / spare] = false;
    });
    group_.sync();
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
      above += is_above(r), open += is_open(r);
    });
    above_ = group_.sum32(above), open_ = group_.sum32(open);
    group_.sync();
  }

  // Moves copies of a slot, after the rest at `at` gave its place to `last`. Whether some are left to be offered.
  ISOLOAD_HD bool offer(int from, int at, int last) {
    const int R = in_.R, giver = ws_.rank[from], e = in_.slot_to_expert[from], owner = ws_.owner[e];
    const int first = owner / in_.per_node * in_.per_node, end = first + in_.per_node;
    const char* const holds = ws_.holds + int64_t(e) * R;
    int32_t gain = 0;
    int r = 0;
    if (is_above(giver)) {
      gain = group_.largest(
          R,
          [&](int q) -> int32_t {
            const int32_t room = level_ - ws_.load[q];
            if (holds[q]) return room;
            const bool near = q >= first && q < end;
            if (room <= 0 || ws_.free[q] == 0 || (in_.within && !near)) return -1;
            return room - (near ? in_.near_import : in_.far_import);
          },
          r);
    }
    const bool near = r >= first && r < end;
    const bool held = holds[r];
    const int32_t free = ws_.free[r], here = ws_.of_level[from];
    const int32_t cost_in = held ? 0 : near ? in_.near_import : in_.far_import;
    const int32_t cost_out = held ? 0 : near ? in_.near_export : in_.far_export;
    const int32_t room = gain + cost_in, copies = here < room ? here : room;
    const bool pays = gain > 0 && copies > cost_in && copies > cost_out;
    const int32_t left = ws_.load[giver] - copies, more = ws_.load[r] + copies;
    if (pays) {
      above_ -= left - level_ < in_.min_chunk;
      open_ += (left < level_ && ws_.free[giver] > 0) - (free > 0 && (more == level_ || (!held && free == 1)));
    }
    group_.sync();  // all have read what is written here
    if (group_.rank() == 0) {
      if (at >= 0) ws_.rests[at] = last;
      if (pays) {
        const int to = held ? slot_of(e, r) : (r + 1) * in_.S - free;
        if (!held) {
          ws_.lent[(r + 1) * in_.spare - free] = e, ws_.holds[int64_t(e) * R + r] = true, ws_.of_level[to] = 0;
          ws_.free[r] = free - 1, ws_.imported[r] += cost_in, ws_.exported[owner] += cost_out;
        }
        ws_.of_level[to] += copies, ws_.of_level[from] = here - copies;
        ws_.load[r] = more, ws_.load[giver] = left;
      }
    }
    group_.sync();
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
