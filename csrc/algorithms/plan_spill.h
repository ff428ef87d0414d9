// plan_spill: overloaded ranks hand copies, and the experts' weights, to less loaded ranks for one batch. The
// weights go into spare slots, so memory does not grow with the imbalance.
//
// Towards a capacity (LLEP, papers/003), one try of spill_greedy; where spare slots run out, a search over
// levels by spill_level. Towards the least cost, where the receiver pays for its imports, a search over
// targets: the cost a try reaches does not fall steadily with its target, so kSpillWays of them are tried at
// once, one per lane, and the best one's neighbourhood again. Beside replicas both start twice: from the
// split that is given, and from all home slots. A plan that is kept is in a state of its own, so none is made
// twice. Integers only, ties go to the lowest rank, then slot; the number of lanes changes nothing.
#pragma once

#include <cstdint>

#include "algorithms/spill_greedy.h"
#include "algorithms/spill_level.h"
#include "algorithms/spill_problem.h"
#include "host_device.h"

namespace isoload {

template <class Team>
class Spill {
 public:
  ISOLOAD_HD Spill(Team& team, const SpillProblem& problem, const SpillWorkspace& workspace,
                   const SpillResult& out)
      : team_(team), in_(problem), ws_(workspace), out_(out) {}

  ISOLOAD_HD SpillStatus solve() {
    const SpillStatus status = add_up();
    if (status != SpillStatus::ok) return status;
    alive_ = sum(in_.R, [&](int r) { return ws_.free[r] = alive(r) ? in_.spare : 0, alive(r); });
    if (alive_ == 0) return SpillStatus::none_alive;
    const SpillView given = settle(ws_.given, in_.start);
    if (is_balanced(given)) {
      attempt(given, given.busiest, 0);
      publish(given, given.busiest, kBelowThreshold);
      return SpillStatus::ok;
    }
    const int64_t capacity = capacity_of(given), slack = capacity * in_.tolerance_ppm / kMillion;
    lend(given, capacity, slack);
    if (in_.start && given.replicated && may_improve(given, capacity)) lend_from_home(capacity, slack);
    const int32_t flags = ws_.flags[kept_];
    if (capacity == 0)
      publish(given, ws_.reached[kept_], flags & kEgressLimit);
    else
      publish(given, capacity, flags & kNoSpareSlot ? level_out(given, capacity, slack) : flags);
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

  // The copies as they are before anything is lent: as `start` has them, or if null all in home slots.
  ISOLOAD_HD SpillView settle(const SpillStart& at, const int32_t* start) {
    const int P = in_.R * in_.S;
    team_.for_each(P, [&](int p) {
      const int e = in_.slot_to_expert[p];
      const bool home = e >= 0 && e < in_.E && in_.home_slot[e] == p;
      at.copies[p] = start ? start[p] : home ? ws_.total[e] : 0;
    });
    team_.sync();
    team_.for_each(in_.R, [&](int r) {
      at.load[r] = fixed(r);
      for (int p = r * in_.S; p < r * in_.S + in_.S; ++p) at.load[r] += at.copies[p];
    });
    team_.sync();
    team_.for_each(in_.R, [&](int r) {
      const int32_t load = at.load[r];
      int before = 0;
      for (int q = 0; q < r; ++q) before += at.load[q] >= load;
      for (int q = r + 1; q < in_.R; ++q) before += at.load[q] > load;
      at.order[before] = r;
    });
    const int64_t busiest = max(in_.R, [&](int r) { return at.load[r]; });
    const int64_t replicas = sum(P, [&](int p) {
      const int e = in_.slot_to_expert[p];
      return e >= 0 && e < in_.E && in_.home_slot[e] != p;
    });
    return {in_.R,
            in_.S,
            in_.per_node,
            in_.spare,
            in_.slot_to_expert,
            in_.home_slot,
            at.copies,
            at.load,
            at.order,
            busiest,
            replicas > 0,
            in_.capacity_ppm ? in_.min_chunk : 1,
            in_.min_chunk,
            {in_.far_cost, in_.near_cost},
            in_.egress,
            in_.within};
  }

  // f(copies, live ranks) of every group that lends within itself, the nodes or all ranks; the largest value.
  template <class F>
  ISOLOAD_HD int64_t max_of_groups(const SpillView& view, F&& f) {
    if (!in_.within) return f(total_, alive_);
    return max(in_.R / in_.per_node, [&](int node) {
      int64_t copies = 0, live = 0;
      for (int r = node * in_.per_node; r < (node + 1) * in_.per_node; ++r)
        copies += view.load[r], live += alive(r);
      return live ? f(copies, live) : 0;
    });
  }

  ISOLOAD_HD bool is_balanced(const SpillView& view) {
    if (!in_.per_expert)
      return max_of_groups(view, [&](int64_t copies, int64_t live) {
        return int64_t(view.busiest * live * kMillion <= copies * in_.threshold_ppm);
      });
    const int64_t top = max(in_.E, [&](int e) { return ws_.total[e]; });
    return top * in_.E * kMillion <= experts_ * in_.threshold_ppm;
  }

  // 0 where the least cost is sought.
  ISOLOAD_HD int64_t capacity_of(const SpillView& view) {
    const int64_t capacity = max_of_groups(view, [&](int64_t copies, int64_t live) {
      return ceil_div(copies * in_.capacity_ppm, kMillion * live);
    });
    return capacity < INT32_MAX ? capacity : INT32_MAX;
  }

  // Towards the capacity, or the least cost.
  ISOLOAD_HD void lend(const SpillView& view, int64_t capacity, int64_t slack) {
    attempt(view, capacity ? capacity : view.busiest, slack);
    if (capacity == 0) search(view);
  }

  // What a plan's cost is compared at: an excess below min_chunk counts for nothing.
  ISOLOAD_HD int64_t enough(const SpillView& view, int64_t capacity) const {
    return capacity ? capacity + view.min_excess - 1 : 0;
  }

  // Whether a plan could have a lower cost than the one kept, or fewer imports.
  ISOLOAD_HD bool may_improve(const SpillView& view, int64_t capacity) {
    const int64_t least = max_of_groups(view, ceil_div), any = enough(view, capacity);
    return ws_.reached[kept_] > (least > any ? least : any) || count_imports(ws_.state(kept_)) > 0;
  }

  // Lends once more as if no replica had taken copies: the exact split may leave several ranks a little above
  // the capacity, each of which needs an import, where one would have done.
  ISOLOAD_HD void lend_from_home(int64_t capacity, int64_t slack) {
    const int split = kept_;
    kept_ = aside_, aside_ = split;
    const SpillView home = settle(ws_.home, nullptr);
    lend(home, capacity, slack);
    const int64_t any = enough(home, capacity);
    auto at_least = [&](int64_t n) { return n > any ? n : any; };
    const int64_t cost = at_least(ws_.reached[split]), other = at_least(ws_.reached[kept_]);
    const SpillState first = ws_.state(split), second = ws_.state(kept_);
    const bool no_worse = count_imports(first) <= count_imports(second) &&
                          at_least(peak_of(first)) <= at_least(peak_of(second));
    if (cost < other || (cost == other && no_worse)) aside_ = kept_, kept_ = split;
  }

  ISOLOAD_HD int64_t count_imports(const SpillState& state) {
    return sum(in_.R, [&](int r) { return ws_.free[r] - state.free[r]; });
  }
  ISOLOAD_HD int64_t peak_of(const SpillState& state) {
    return max(in_.R, [&](int r) {
      int32_t load = fixed(r);
      for (int p = r * in_.S; p < r * in_.S + in_.S; ++p) load += state.quota[p];
      return load;
    });
  }

  // The lowest target at which the other ranks have room for all excess if each pays for one import.
  ISOLOAD_HD int64_t least_target(const SpillView& view) {
    const int64_t cost = view.replicated ? 0 : view.least_import_cost();
    int64_t low = max_of_groups(view, ceil_div), high = view.busiest;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      const int64_t spare_room = sum(in_.R, [&](int r) {
        const int64_t load = view.load[r], room = middle - cost - load;
        return load > middle ? middle - load : room > 0 && alive(r) ? room : 0;
      });
      spare_room >= 0 ? high = middle : low = middle + 1;
    }
    return low;
  }

  // The k-th state that holds no plan to be kept.
  ISOLOAD_HD int way(int k) const {
    k += k >= (kept_ < aside_ ? kept_ : aside_);
    return k + (k >= (kept_ < aside_ ? aside_ : kept_));
  }

  // The target of the least cost found: geometric steps above the least target, then even ones.
  ISOLOAD_HD void search(const SpillView& view) {
    int64_t low = least_target(view), least = view.busiest;
    for (int round = 0; round < kSpillRounds; ++round) {
      const int64_t span = least - low;
      if (span < low / kSpillFine) break;
      auto step = [&](int k) { return round ? span * k / kSpillWays : k ? span >> (kSpillWays - k) : 0; };
      team_.for_each(kSpillWays, [&](int k) { try_target(view, way(k), low + step(k), 0, least); });
      team_.sync();
      int chosen = 0;
      for (int k = 1; k < kSpillWays; ++k)
        if (ws_.reached[way(k)] < ws_.reached[way(chosen)]) chosen = k;
      const int64_t cost = ws_.reached[way(chosen)];
      if (cost < least) least = cost, kept_ = way(chosen);
      low += step(chosen > 0 ? chosen - 1 : 0);
      team_.sync();  // before anybody tries again
    }
  }

  // Where spare slots ran out: the lowest level found from where copies were given, if it is below the plan
  // that is kept. Returns the flags.
  ISOLOAD_HD int32_t level_out(const SpillView& view, int64_t capacity, int64_t slack) {
    const int32_t flags = ws_.flags[kept_];
    const SpillQueue queue = queue_up(view, capacity);
    if (!seek(view, least_level(view, capacity, queue), capacity + slack, queue)) return flags;
    const int64_t above = ws_.reached[kept_] - capacity;
    if (team_.rank() == 0) SpillLevel(view, ws_.state(kept_), 0, queue).take_back(capacity + above);
    team_.sync();
    return above <= slack ? 0 : above < view.min_excess ? kSmallExcess : flags;
  }

  // The slots whose copies may be lent and the ranks that may take some, in order.
  ISOLOAD_HD SpillQueue queue_up(const SpillView& view, int64_t capacity) {
    const int P = in_.R * in_.S;
    auto lends = [&](int p, int r) {
      return view.start[p] >= view.min_chunk && view.load[r] >= capacity + view.min_excess;
    };
    team_.for_each(in_.R, [&](int r) {
      for (int p = r * in_.S; p < r * in_.S + in_.S; ++p) ws_.giver[p] = r, ws_.index[p] = lends(p, r);
    });
    team_.sync();
    const int n = team_.scan(ws_.index, P);
    team_.for_each(P, [&](int p) {
      if (lends(p, ws_.giver[p])) ws_.slots[ws_.index[p]] = p, ws_.copies[ws_.index[p]] = view.start[p];
    });
    team_.sync();
    team_.for_each(n, [&](int i) {  // sorted by counting: needs no other lane
      const int32_t mine = ws_.copies[i];
      int before = 0;
      for (int k = 0; k < i; ++k) before += ws_.copies[k] >= mine;
      for (int k = i + 1; k < n; ++k) before += ws_.copies[k] > mine;
      ws_.queue[before] = ws_.slots[i];
    });
    team_.for_each(view.num_groups(), [&](int g) {
      int64_t* next = ws_.roomy + g * view.per_node;
      int64_t* const end = next + view.group_size();
      for (int last = in_.R - 1, first; last >= 0; last = first - 1) {  // equal loads, the lowest rank first
        for (first = last; first > 0 && view.load[view.order[first - 1]] == view.load[view.order[last]];)
          --first;
        for (int i = first; i <= last; ++i)
          if (const int r = view.order[i]; view.group(r) == g && ws_.free[r] > 0)
            *next++ = load_key(view.load[r], r);
      }
      while (next < end) *next++ = INT64_MAX;
    });
    team_.sync();
    return {n, ws_.queue, ws_.giver, ws_.roomy, ws_.free};
  }

  // A level that no plan is below: with its spare slots full of the largest chunks a rank still has room.
  ISOLOAD_HD int64_t least_level(const SpillView& view, int64_t capacity, const SpillQueue& queue) {
    if (view.replicated) return capacity;  // whose ranks take copies without a spare slot
    int64_t most = 0, low = capacity, high = ws_.reached[kept_];
    for (int i = 0; i < in_.spare && i < queue.n; ++i) most += view.start[queue.slots[i]];
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      const int64_t room = sum(in_.R, [&](int r) {
        const int64_t left = middle - view.load[r], more = queue.free[r] > 0 ? most : 0;
        return left < more ? left : more;
      });
      room >= 0 ? high = middle : low = middle + 1;
    }
    return low;
  }

  // Keeps the plan of the level with the least load found, if that is below the plan's kept; returns whether
  // it is. Each round tries a level near the lowest one open and a higher one, which does not count if the
  // lower one was reached. A level that was missed is too low by an equal part of what is above it at least.
  ISOLOAD_HD bool seek(const SpillView& view, int64_t low, int64_t enough, const SpillQueue& queue) {
    static_assert(kLevelWays == 2, "a lane alone skips the way after one that was reached");
    bool found = false;
    int64_t least = ws_.reached[kept_];
    for (int round = 0; round < kLevelRounds && least > enough && least - low > low / kLevelFine; ++round) {
      const int64_t span = least - low, from = low;
      auto level = [&](int k) {
        return from + (round ? span * (k + 1) / (kLevelWays + 1) : span * k / kLevelFirst);
      };
      auto is_reached = [&](int k) { return ws_.reached[way(k)] <= level(k); };
      team_.for_each(kLevelWays, [&](int k) {
        if (k > 0 && team_.size() == 1 && is_reached(k - 1)) return;
        SpillLevel attempt(view, ws_.state(way(k)), level(k), queue);
        ws_.reached[way(k)] = attempt.run();
        ws_.above[way(k)] = attempt.copies_above();
      });
      team_.sync();
      int lowest = -1;
      for (int k = 0; k < kLevelWays; ++k) {
        const int64_t reached = ws_.reached[way(k)];
        if (reached < least) least = reached, lowest = k;
        if (is_reached(k)) break;
        low = level(k) + ws_.above[way(k)] / in_.R + 1;
      }
      if (lowest >= 0) kept_ = way(lowest), found = true;
      team_.sync();  // before the levels of the next round
    }
    return found;
  }

  ISOLOAD_HD void try_target(const SpillView& view, int state, int64_t target, int64_t slack, int64_t limit) {
    SpillGreedy greedy(view, ws_.state(state), target);
    ws_.reached[state] = greedy.run(ws_.free, slack, limit);
    ws_.flags[state] = greedy.flags();
  }

  // One try, kept.
  ISOLOAD_HD void attempt(const SpillView& view, int64_t target, int64_t slack) {
    if (team_.rank() == 0) try_target(view, kept_, target, slack, INT64_MAX);
    team_.sync();
  }

  // The plan that is kept.
  ISOLOAD_HD void publish(const SpillView& view, int64_t level, int32_t flags) {
    const SpillState state = ws_.state(kept_);
    int64_t imports = 0, most_imports = 0, across = 0;
    team_.for_each(in_.R, [&](int r) {
      const int end = (r + 1) * in_.S, first = end - ws_.free[r], last = end - state.free[r];
      for (int p = r * in_.S; p < end; ++p) {
        out_.quota[p] = state.quota[p];
        out_.slot_to_expert[p] = in_.slot_to_expert[p];
      }
      for (int p = first; p < last; ++p) {
        const int e = out_.slot_to_expert[p] = in_.slot_to_expert[state.lender[p]];
        across += in_.per_node < in_.R && view.owner(e) / in_.per_node != r / in_.per_node;
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
    team_.sync();  // a caller's lanes may read the result; a kernel that ends here needs no barrier
  }

  Team& team_;
  const SpillProblem& in_;
  const SpillWorkspace& ws_;
  const SpillResult& out_;
  int64_t total_ = 0, experts_ = 0, alive_ = 0;  // copies; of experts; live ranks
  int kept_ = 0, aside_ = 1;                     // states: of the best plan so far, of one to compare it with
};

}  // namespace isoload
