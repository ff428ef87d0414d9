// plan_spill: overloaded ranks hand copies, and the experts' weights, to less loaded ranks for one batch. The
// weights go into spare slots, so memory does not grow with the imbalance.
//
// Towards a capacity (LLEP, papers/003), one try of spill_greedy. Towards the least cost, where the receiver
// pays for its imports, a search over targets: the cost a try reaches does not fall steadily with its target,
// so kSpillWays of them are tried at once, one per lane, and the best one's neighbourhood again. Integers
// only, ties go to the lowest rank, then slot; the number of lanes changes nothing.
#pragma once

#include <cstdint>

#include "algorithms/spill_greedy.h"
#include "algorithms/spill_level.h"
#include "host_device.h"

namespace isoload {

constexpr int kSpillWays = 4, kSpillRounds = 3, kSpillFine = 1000;
constexpr int kLevelWays = 2, kLevelRounds = 6, kLevelFine = 10000;
constexpr int64_t kMillion = 1000000;

enum class SpillStatus : int32_t { ok = 0, negative = 1, too_many_copies = 2, none_alive = 3 };

struct SpillProblem {
  int R, E, S, per_node, spare;   // ranks, routed experts, slots per rank, ranks per node, spare slots
  const int32_t *loads, *fixed;   // [num_sources, E] copies; [R] copies that stay where they are, or null
  int num_sources;                //
  const int32_t* slot_to_expert;  // [P] with the spare slots empty
  const int32_t* home_slot;       // [E]
  const int32_t* start;           // [P] copies per slot before anything is lent, or null: all in home slots
  const bool* alive;              // [R] or null
  int64_t capacity_ppm, threshold_ppm;  // of the mean; capacity 0 = search for the least cost
  bool per_expert;                      // the threshold is about experts, not about ranks
  int64_t tolerance_ppm, min_chunk, near_cost, far_cost;
  int32_t egress;
  bool within;  // experts do not leave their node
};

struct SpillResult {
  int32_t *slot_to_expert, *quota;  // [P]
  int64_t* level;                   // [1] the capacity, or the largest cost where that was searched
  int32_t* telemetry;  // [5] imports, most imports and exports of a rank, imports from other nodes, flags
};

// Caller's memory; every array is written before it is read.
struct SpillWorkspace {
  SpillState state[kSpillWays];
  int64_t* reached;                 // [kSpillWays] cost of each try
  int32_t *flags, *total;           // [1] of the try; [E]
  int32_t *load, *order, *free;     // [R]
  int32_t *start, *queue;           // [P]; [P] slots whose copies may be lent
  int32_t *index, *slots, *copies;  // [P] to find them

  ISOLOAD_HD static int64_t bytes(int64_t R, int64_t E, int64_t P) {
    return 8 * kSpillWays * (1 + R) + 4 * (kSpillWays * (5 * R + 3 * P) + 1 + E + 3 * R + 5 * P);
  }
  ISOLOAD_HD static SpillWorkspace at(void* memory, int64_t R, int64_t E, int64_t P) {
    SpillWorkspace ws;
    ws.reached = static_cast<int64_t*>(memory);
    int64_t* const heaps = ws.reached + kSpillWays;
    int32_t* next = reinterpret_cast<int32_t*>(heaps + kSpillWays * R);
    auto take = [&](int64_t n) { return next += n, next - n; };
    for (int k = 0; k < kSpillWays; ++k)
      ws.state[k] =
          SpillState{heaps + k * R, take(R), take(R), take(R), take(R), take(R), take(P), take(P), take(P)};
    ws.flags = take(1), ws.total = take(E);
    ws.load = take(R), ws.order = take(R), ws.free = take(R);
    ws.start = take(P), ws.queue = take(P);
    ws.index = take(P), ws.slots = take(P), ws.copies = take(P);
    return ws;
  }
};

template <class Team>
class Spill {
 public:
  ISOLOAD_HD Spill(Team& team, const SpillProblem& problem, const SpillWorkspace& workspace,
                   const SpillResult& out)
      : team_(team), in_(problem), ws_(workspace), out_(out) {}

  ISOLOAD_HD SpillStatus solve() {
    const SpillStatus status = add_up();
    if (status != SpillStatus::ok) return status;
    settle_view();
    if (alive_ == 0) return SpillStatus::none_alive;
    if (is_balanced()) {
      attempt(busiest_, 0);
      publish(busiest_, kBelowThreshold);
    } else if (in_.capacity_ppm == 0) {
      attempt(search(), 0);
      publish(ws_.reached[0], *ws_.flags & kEgressLimit);
    } else {
      const int64_t capacity = max_of_groups(
          [&](int64_t copies, int64_t live) { return ceil_div(copies * in_.capacity_ppm, kMillion * live); });
      reach(capacity < INT32_MAX ? capacity : INT32_MAX);
    }
    return SpillStatus::ok;
  }

 private:
  ISOLOAD_HD static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
  ISOLOAD_HD bool alive(int r) const { return !in_.alive || in_.alive[r]; }

  template <class F>
  ISOLOAD_HD int64_t sum(int n, F&& f) {
    int64_t mine = 0;
    team_.for_each(n, [&](int i) { mine += f(i); });
    return team_.sum(mine);
  }
  template <class F>
  ISOLOAD_HD int64_t max(int n, F&& f) {
    int64_t mine = 0;
    team_.for_each(n, [&](int i) {
      const int64_t value = f(i);
      mine = value > mine ? value : mine;
    });
    return team_.max(mine);
  }

  // Copies per expert and per rank; refuses what is no load.
  ISOLOAD_HD SpillStatus add_up() {
    int32_t sign = 0, wrapped = 0;
    team_.for_each(in_.E, [&](int e) { sign |= ws_.total[e] = in_.loads[e]; });
    for (int s = 1; s < in_.num_sources; ++s) {  // a lane keeps its experts, so no barrier between rows
      const int32_t* row = in_.loads + int64_t(s) * in_.E;
      team_.for_each(in_.E, [&](int e) {
        sign |= row[e];
        wrapped |= ws_.total[e] = static_cast<int32_t>(uint32_t(ws_.total[e]) + uint32_t(row[e]));
      });
    }
    team_.for_each(in_.R, [&](int r) { sign |= fixed(r); });
    if (team_.any(sign < 0)) return SpillStatus::negative;
    experts_ = sum(in_.E, [&](int e) { return ws_.total[e]; });
    total_ = experts_ + sum(in_.R, [&](int r) { return fixed(r); });
    if (team_.any(wrapped < 0) || total_ > INT32_MAX) return SpillStatus::too_many_copies;
    return SpillStatus::ok;
  }
  ISOLOAD_HD int32_t fixed(int r) const { return in_.fixed ? in_.fixed[r] : 0; }

  // Where the copies are before anything is lent: as given, else every expert's in its home slot.
  ISOLOAD_HD void settle_view() {
    const int P = in_.R * in_.S;
    team_.for_each(P, [&](int p) {
      const int e = in_.slot_to_expert[p];
      const bool home = e >= 0 && e < in_.E && in_.home_slot[e] == p;
      ws_.start[p] = in_.start ? in_.start[p] : home ? ws_.total[e] : 0;
    });
    team_.sync();
    team_.for_each(in_.R, [&](int r) {
      int32_t load = fixed(r);
      for (int p = r * in_.S; p < r * in_.S + in_.S; ++p) load += ws_.start[p];
      ws_.load[r] = load;
      ws_.free[r] = alive(r) ? in_.spare : 0;
    });
    team_.sync();
    team_.for_each(in_.R, [&](int r) {
      const int32_t load = ws_.load[r];
      int before = 0;
      for (int q = 0; q < r; ++q) before += ws_.load[q] >= load;
      for (int q = r + 1; q < in_.R; ++q) before += ws_.load[q] > load;
      ws_.order[before] = r;
    });
    alive_ = sum(in_.R, [&](int r) { return alive(r); });
    busiest_ = max(in_.R, [&](int r) { return ws_.load[r]; });
    const int64_t replicas = sum(P, [&](int p) {
      const int e = in_.slot_to_expert[p];
      return e >= 0 && e < in_.E && in_.home_slot[e] != p;
    });
    view_ = SpillView{in_.R,
                      in_.S,
                      in_.per_node,
                      in_.spare,
                      in_.slot_to_expert,
                      in_.home_slot,
                      ws_.start,
                      ws_.load,
                      ws_.order,
                      replicas > 0,
                      in_.capacity_ppm ? in_.min_chunk : 1,
                      in_.min_chunk,
                      {in_.far_cost, in_.near_cost},
                      in_.egress,
                      in_.within};
  }

  // f(copies, live ranks) of every group that lends within itself, the nodes or all ranks; the largest value.
  template <class F>
  ISOLOAD_HD int64_t max_of_groups(F&& f) {
    if (!in_.within) return f(total_, alive_);
    return max(in_.R / in_.per_node, [&](int node) {
      int64_t copies = 0, live = 0;
      for (int r = node * in_.per_node; r < (node + 1) * in_.per_node; ++r)
        copies += ws_.load[r], live += alive(r);
      return live ? f(copies, live) : 0;
    });
  }

  ISOLOAD_HD bool is_balanced() {
    if (!in_.per_expert)
      return max_of_groups([&](int64_t copies, int64_t live) {
        return int64_t(busiest_ * live * kMillion <= copies * in_.threshold_ppm);
      });
    const int64_t top = max(in_.E, [&](int e) { return ws_.total[e]; });
    return top * in_.E * kMillion <= experts_ * in_.threshold_ppm;
  }

  // The lowest target at which the other ranks have room for all excess if each pays for one import.
  ISOLOAD_HD int64_t least_target() {
    const int64_t cost = view_.replicated ? 0 : view_.least_import_cost();
    int64_t low = max_of_groups(ceil_div), high = busiest_;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      const int64_t spare_room = sum(in_.R, [&](int r) {
        const int64_t load = ws_.load[r], room = middle - cost - load;
        return load > middle ? middle - load : room > 0 && alive(r) ? room : 0;
      });
      spare_room >= 0 ? high = middle : low = middle + 1;
    }
    return low;
  }

  // The target of the least cost found: geometric steps above the least target, then even ones.
  ISOLOAD_HD int64_t search() {
    int64_t low = least_target(), least = busiest_, best = busiest_;
    for (int round = 0; round < kSpillRounds; ++round) {
      const int64_t span = least - low;
      if (span < low / kSpillFine) break;
      auto step = [&](int k) { return round ? span * k / kSpillWays : k ? span >> (kSpillWays - k) : 0; };
      team_.for_each(kSpillWays, [&](int k) {
        ws_.reached[k] = SpillGreedy(view_, ws_.state[k], low + step(k)).run(ws_.free, 0, least);
      });
      team_.sync();
      int chosen = 0;
      for (int k = 1; k < kSpillWays; ++k)
        if (ws_.reached[k] < ws_.reached[chosen]) chosen = k;
      if (ws_.reached[chosen] < least) least = ws_.reached[chosen], best = low + step(chosen);
      low += step(chosen > 0 ? chosen - 1 : 0);
      team_.sync();  // before anybody tries again
    }
    return best;
  }

  // Towards the capacity; where spare slots run out, the lowest level found.
  ISOLOAD_HD void reach(int64_t capacity) {
    const int64_t slack = capacity * in_.tolerance_ppm / kMillion;
    attempt(capacity, slack);
    const int64_t reached = ws_.reached[0];
    const int32_t flags = *ws_.flags;
    publish(capacity, flags);
    if (!(flags & kNoSpareSlot)) return;
    const int n = queue_up(capacity);
    const int64_t level = seek(capacity, capacity + slack, reached, n);
    if (level < 0) return;
    if (team_.rank() == 0) {
      SpillLevel chosen(view_, ws_.state[0], level, ws_.queue, n);
      const int64_t largest = ws_.reached[0] = chosen.run(ws_.free);
      chosen.take_back(largest);
    }
    team_.sync();
    const int64_t above = ws_.reached[0] - capacity;
    publish(capacity, above <= slack ? 0 : above < view_.min_excess ? kSmallExcess : flags);
  }

  // The slots whose copies may be lent, most copies first, then the lowest; how many.
  ISOLOAD_HD int queue_up(int64_t capacity) {
    const int P = in_.R * in_.S;
    auto lends = [&](int p) {
      return ws_.start[p] > 0 && ws_.load[p / in_.S] >= capacity + view_.min_excess;
    };
    team_.for_each(P, [&](int p) { ws_.index[p] = lends(p); });
    team_.sync();
    const int n = team_.scan(ws_.index, P);
    team_.for_each(P, [&](int p) {
      if (lends(p)) ws_.slots[ws_.index[p]] = p, ws_.copies[ws_.index[p]] = ws_.start[p];
    });
    team_.sync();
    team_.for_each(n, [&](int i) {  // sorted by counting: needs no other lane
      const int32_t mine = ws_.copies[i];
      int before = 0;
      for (int k = 0; k < i; ++k) before += ws_.copies[k] >= mine;
      for (int k = i + 1; k < n; ++k) before += ws_.copies[k] > mine;
      ws_.queue[before] = ws_.slots[i];
    });
    team_.sync();
    return n;
  }

  // The level of the least load found, below `least`, or -1: each round cuts the range where it is in parts.
  ISOLOAD_HD int64_t seek(int64_t low, int64_t enough, int64_t least, int n) {
    int64_t best = -1;
    for (int round = 0; round < kLevelRounds && least > enough && least - low > low / kLevelFine; ++round) {
      const int64_t span = least - low;
      auto level = [&](int k) {
        return low + (round ? span * (k + 1) / (kLevelWays + 1) : span * k / kLevelWays);
      };
      team_.for_each(kLevelWays, [&](int k) {
        ws_.reached[k] = SpillLevel(view_, ws_.state[k], level(k), ws_.queue, n).run(ws_.free);
      });
      team_.sync();
      int kept = kLevelWays;
      for (int k = kLevelWays - 1; k >= 0; --k) {
        if (ws_.reached[k] <= level(k)) kept = k;
        if (ws_.reached[k] < least) least = ws_.reached[k], best = level(k);
      }
      low = kept > 0 ? level(kept - 1) : low;
      team_.sync();  // before the levels of the next round
    }
    return best;
  }

  // One try on lane 0, with its largest cost and its flags.
  ISOLOAD_HD void attempt(int64_t target, int64_t slack) {
    if (team_.rank() == 0) {
      SpillGreedy greedy(view_, ws_.state[0], target);
      ws_.reached[0] = greedy.run(ws_.free, slack, INT64_MAX);
      *ws_.flags = greedy.flags();
    }
    team_.sync();
  }

  // The result of the try in state 0.
  ISOLOAD_HD void publish(int64_t level, int32_t flags) {
    const SpillState& state = ws_.state[0];
    int64_t imports = 0, most_imports = 0, across = 0;
    team_.for_each(in_.R, [&](int r) {
      const int end = (r + 1) * in_.S, first = end - ws_.free[r], last = end - state.free[r];
      for (int p = r * in_.S; p < end; ++p) {
        out_.quota[p] = state.quota[p];
        out_.slot_to_expert[p] = in_.slot_to_expert[p];
      }
      for (int p = first; p < last; ++p) {
        const int e = out_.slot_to_expert[p] = in_.slot_to_expert[state.lender[p]];
        across += view_.owner(e) / in_.per_node != r / in_.per_node;
      }
      imports += last - first;
      most_imports = last - first > most_imports ? last - first : most_imports;
    });
    imports = team_.sum(imports), across = team_.sum(across), most_imports = team_.max(most_imports);
    const int64_t most_exports = max(in_.R, [&](int r) { return state.exports[r]; });
    if (team_.rank() == 0) {
      *out_.level = level;
      const int64_t telemetry[] = {imports, most_imports, most_exports, across, flags};
      for (int i = 0; i < 5; ++i) out_.telemetry[i] = static_cast<int32_t>(telemetry[i]);
    }
    team_.sync();  // before the next try
  }

  Team& team_;
  const SpillProblem& in_;
  const SpillWorkspace& ws_;
  const SpillResult& out_;
  SpillView view_{};
  int64_t total_ = 0, experts_ = 0, alive_ = 0, busiest_ = 0;  // copies; of experts; live ranks; largest load
};

}  // namespace isoload
