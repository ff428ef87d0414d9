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
#include "host_device.h"

namespace isoload {

constexpr int kSpillWays = 4, kSpillRounds = 3, kSpillFine = 1000;
constexpr int64_t kMillion = 1000000;

enum class SpillStatus : int32_t { ok = 0, negative = 1, too_many_copies = 2, none_alive = 3 };

struct SpillProblem {
  int R, E, S, per_node, spare;   // ranks, routed experts, slots per rank, ranks per node, spare slots
  const int32_t *loads, *fixed;   // [num_sources, E] copies; [R] copies that stay where they are, or null
  int num_sources;                //
  const int32_t* slot_to_expert;  // [P] with the spare slots empty
  const int32_t* home_slot;       // [E]
  const bool* alive;              // [R] or null
  int64_t capacity_ppm, threshold_ppm;  // of the mean; capacity 0 = search for the least cost
  bool per_expert;                      // the threshold is about experts, not about ranks
  int64_t tolerance_ppm, min_chunk, near_cost, far_cost;
  int32_t egress;
};

struct SpillResult {
  int32_t *slot_to_expert, *quota;  // [P]
  int64_t* level;                   // [1] the capacity, or the largest cost where that was searched
  int32_t* telemetry;  // [5] imports, most imports and exports of a rank, imports from other nodes, flags
};

// Caller's memory; every array is written before it is read.
struct SpillWorkspace {
  SpillState state[kSpillWays];
  int64_t* reached;              // [kSpillWays] cost of each try
  int32_t *total, *at_home;      // [E]; [P]
  int32_t *load, *order, *free;  // [R]

  ISOLOAD_HD static int64_t bytes(int64_t R, int64_t E, int64_t P) {
    return 8 * kSpillWays + 4 * (kSpillWays * (5 * R + 2 * P) + E + P + 3 * R);
  }
  ISOLOAD_HD static SpillWorkspace at(void* memory, int64_t R, int64_t E, int64_t P) {
    SpillWorkspace ws;
    ws.reached = static_cast<int64_t*>(memory);
    int32_t* next = reinterpret_cast<int32_t*>(ws.reached + kSpillWays);
    auto take = [&](int64_t n) { return next += n, next - n; };
    for (SpillState& state : ws.state)
      state = SpillState{take(R), take(R), take(R), take(R), take(R), take(P), take(P)};
    ws.total = take(E), ws.at_home = take(P);
    ws.load = take(R), ws.order = take(R), ws.free = take(R);
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
      finish(busiest_, 0, busiest_, kBelowThreshold);
    } else if (in_.capacity_ppm == 0) {
      finish(search(), 0, -1, 0);
    } else {
      int64_t capacity = ceil_div(total_ * in_.capacity_ppm, kMillion * alive_);
      capacity = capacity < INT32_MAX ? capacity : INT32_MAX;
      finish(capacity, capacity * in_.tolerance_ppm / kMillion, capacity, 0);
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

  ISOLOAD_HD void settle_view() {
    const int P = in_.R * in_.S;
    team_.for_each(P, [&](int p) {
      const int e = in_.slot_to_expert[p];
      ws_.at_home[p] = e >= 0 && e < in_.E && in_.home_slot[e] == p ? ws_.total[e] : 0;
    });
    team_.sync();
    team_.for_each(in_.R, [&](int r) {
      int32_t load = fixed(r);
      for (int p = r * in_.S; p < r * in_.S + in_.S; ++p) load += ws_.at_home[p];
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
                      ws_.at_home,
                      ws_.load,
                      ws_.order,
                      replicas > 0,
                      in_.min_chunk,
                      {in_.far_cost, in_.near_cost},
                      in_.egress};
  }

  ISOLOAD_HD bool is_balanced() {
    if (!in_.per_expert) return busiest_ * alive_ * kMillion <= total_ * in_.threshold_ppm;
    const int64_t top = max(in_.E, [&](int e) { return ws_.total[e]; });
    return top * in_.E * kMillion <= experts_ * in_.threshold_ppm;
  }

  // The lowest target at which the other ranks have room for all excess if each pays for one import.
  ISOLOAD_HD int64_t least_target() {
    const int64_t cost = view_.replicated ? 0 : view_.least_import_cost();
    int64_t low = ceil_div(total_, alive_), high = busiest_;
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
        ws_.reached[k] = SpillGreedy(view_, ws_.state[k], low + step(k), nullptr).run(ws_.free, 0, least);
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

  // The try that counts. level -1: what it reaches.
  ISOLOAD_HD void finish(int64_t target, int64_t slack, int64_t level, int32_t flags) {
    team_.for_each(in_.R * in_.S, [&](int p) { out_.slot_to_expert[p] = in_.slot_to_expert[p]; });
    team_.sync();
    if (team_.rank() == 0) {
      SpillState state = ws_.state[0];
      state.quota = out_.quota;
      SpillGreedy greedy(view_, state, target, out_.slot_to_expert);
      const int64_t reached = greedy.run(ws_.free, slack, INT64_MAX);
      *out_.level = level < 0 ? reached : level;
      int32_t imports = 0, most_imports = 0, most_exports = 0;
      for (int r = 0; r < in_.R; ++r) {
        const int32_t here = ws_.free[r] - state.free[r], lent = state.exports[r];
        imports += here;
        most_imports = here > most_imports ? here : most_imports;
        most_exports = lent > most_exports ? lent : most_exports;
      }
      const int32_t kept = level < 0 ? greedy.flags() & kEgressLimit : greedy.flags();
      const int32_t telemetry[] = {imports, most_imports, most_exports, greedy.across(), flags | kept};
      for (int i = 0; i < 5; ++i) out_.telemetry[i] = telemetry[i];
    }
    team_.sync();
  }

  Team& team_;
  const SpillProblem& in_;
  const SpillWorkspace& ws_;
  const SpillResult& out_;
  SpillView view_{};
  int64_t total_ = 0, experts_ = 0, alive_ = 0, busiest_ = 0;  // copies; of experts; live ranks; largest load
};

}  // namespace isoload
