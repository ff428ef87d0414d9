// plan_spill: overloaded ranks hand copies, and the experts' weights, to less loaded ranks for one batch. The
// weights go into spare slots, so memory does not grow with the imbalance.
//
// Towards a capacity (LLEP, papers/003), one try of spill_greedy; where spare slots run out, a search over
// levels by spill_level. Towards the least cost, where the receiver pays for its imports, a search over
// targets: the cost a try reaches does not fall steadily with its target, so kSpillWays of them are tried at
// once, a group of lanes each, and the best one's neighbourhood again. Beside replicas both start twice: from
// the split that is given, and from all home slots. A plan that is kept is in a state of its own, so none is
// made twice. Integers only, ties go to the lowest rank, then slot; the number of lanes changes nothing.
#pragma once

#include <cstdint>

#include "algorithms/spill_greedy.h"
#include "algorithms/spill_layer.h"
#include "algorithms/spill_level.h"
#include "algorithms/spill_problem.h"
#include "host_device.h"
#include "team.h"

namespace isoload {

template <class Team>
class Spill : SpillLayer<Team> {
 public:
  ISOLOAD_HD Spill(Team& team, const SpillProblem& problem, const SpillWorkspace& workspace,
                   const SpillResult& out)
      : SpillLayer<Team>(team, problem, workspace), out_(out) {}

  // One loop for both starts: a kernel has the code of a try once.
  ISOLOAD_HD SpillStatus solve() {
    const SpillStatus status = this->add_up();
    if (status != SpillStatus::ok) return status;
    if (this->prepare() == 0) return SpillStatus::none_alive;
    bool balanced = false;
    int32_t capacity = 0, slack = 0;
    Worth first{};
    ISOLOAD_ROLLED
    for (bool from_home = false;; from_home = true) {
      this->settle(ws_.start(from_home), from_home ? nullptr : in_.start);
      if (!from_home) {
        balanced = this->is_balanced();
        capacity = balanced ? 0 : this->capacity_of(), slack = this->slack_of(capacity);
      }
      const bool search = capacity == 0 && !balanced;
      lend(capacity ? capacity : view_.busiest, slack, search);
      if (balanced || !in_.start || !view_.replicated) break;
      const Worth worth = worth_of(kept_, capacity);
      if (!from_home && !may_improve(worth, capacity)) break;
      if (!from_home || first.before(worth)) swap_plans();
      if (from_home) break;
      first = worth;
    }
    const SpillStart given = ws_.start(false);
    view_.start = given.copies, view_.load = given.load, view_.order = given.order;
    int32_t flags = balanced ? kBelowThreshold : ws_.flags[kept_];
    if (capacity == 0 && !balanced) flags &= kEgressLimit;
    if (capacity && flags & kNoSpareSlot) flags = level_out(capacity, slack);
    publish(capacity ? capacity : ws_.reached[kept_], flags);
    return SpillStatus::ok;
  }

 private:
  using SpillLayer<Team>::team_;
  using SpillLayer<Team>::in_;
  using SpillLayer<Team>::ws_;
  using SpillLayer<Team>::view_;

  // What plans from two starts are compared by.
  struct Worth {
    int64_t cost, imports, peak;

    // Whether this one is kept though the other came later.
    ISOLOAD_HD bool before(const Worth& other) const {
      return cost < other.cost || (cost == other.cost && imports <= other.imports && peak <= other.peak);
    }
  };

  ISOLOAD_HD void swap_plans() {
    const int kept = kept_;
    kept_ = aside_, aside_ = kept;
  }

  // Towards the target; or from a first try there on, which lends nothing, a search for the least cost: over
  // geometric steps above the least target, then even ones.
  ISOLOAD_HD void lend(int32_t target, int32_t slack, bool search) {
    int32_t low = target, least = INT32_MAX, span = 0;
    ISOLOAD_ROLLED
    for (int round = 0;; ++round) {
      auto step = [&](int k) -> int32_t {
        if (round > 1) return static_cast<int32_t>(uint64_t(uint32_t(span)) * uint32_t(k) / kSpillWays);
        return k ? span >> (kSpillWays - k) : 0;
      };
      team_.for_each_group(round ? kSpillWays : 1, [&](int k, auto& group) {
        try_target(group, round ? way(k) : kept_, low + step(k), slack, least);
      });
      team_.sync();
      if (!search) return;
      if (round == 0) {
        least = ws_.reached[kept_], low = least_target();
      } else {
        int chosen = 0;
        ISOLOAD_ROLLED
        for (int k = 1; k < kSpillWays; ++k)
          if (ws_.reached[way(k)] < ws_.reached[way(chosen)]) chosen = k;
        low += step(chosen > 0 ? chosen - 1 : 0);
        const int32_t cost = ws_.reached[way(chosen)];
        if (cost < least) least = cost, kept_ = way(chosen);
      }
      span = least - low;
      if (round == kSpillRounds || uint32_t(span) < uint32_t(low) / kSpillFine) return;
      team_.sync();  // before anybody tries again
    }
  }

  // What a cost is compared at: an excess below min_chunk counts for nothing.
  ISOLOAD_HD int64_t enough(int64_t capacity) const { return capacity ? capacity + view_.min_excess - 1 : 0; }

  // Whether a plan could have a lower cost than this one, or fewer imports.
  ISOLOAD_HD bool may_improve(const Worth& worth, int64_t capacity) {
    return (worth.cost > enough(capacity) && worth.cost > this->mean()) || worth.imports > 0;
  }

  ISOLOAD_HD Worth worth_of(int plan, int64_t capacity) {
    const SpillState state = ws_.state(plan);
    const int64_t any = enough(capacity), cost = ws_.reached[plan];
    int32_t imports = 0;
    team_.for_each(in_.R, [&](int r) { imports += ws_.free[r] - state.free[r]; });
    const int64_t peak = this->max(in_.R, [&](int r) {
      int32_t load = this->fixed(r);
      ISOLOAD_ROLLED
      for (int p = r * in_.S; p < r * in_.S + in_.S; ++p) load += state.quota[p];
      return load;
    });
    return {cost > any ? cost : any, team_.sum32(imports), peak > any ? peak : any};
  }

  // The lowest target at which the other ranks have room for all excess if each pays for one import.
  ISOLOAD_HD int32_t least_target() {
    const int32_t cost = view_.replicated ? 0 : view_.least_import_cost();
    return this->lowest(this->mean(), view_.busiest, [&](int32_t target, int r) {
      const int32_t room = target - view_.load[r];
      if (room < 0) return room;
      return room > cost && this->alive(r) ? room - cost : 0;
    });
  }

  // The k-th state that holds no plan to be kept.
  ISOLOAD_HD int way(int k) const {
    k += k >= (kept_ < aside_ ? kept_ : aside_);
    return k + (k >= (kept_ < aside_ ? aside_ : kept_));
  }

  // Where spare slots ran out: the lowest level found from where copies were given, if it is below the plan
  // that is kept, which is above capacity and slack. Returns the flags.
  ISOLOAD_HD int32_t level_out(int32_t capacity, int32_t slack) {
    const int32_t flags = ws_.flags[kept_];
    const SpillQueue queue = queue_up(capacity);
    if (!seek(least_level(capacity, queue), capacity + slack, queue)) return flags;
    const int32_t above = ws_.reached[kept_] - capacity;
    team_.alone([&](auto& group) { level_of(group, kept_, 0, queue).take_back(capacity + above); });
    return above <= slack ? 0 : above < view_.min_excess ? kSmallExcess : flags;
  }

  // The slots whose copies may be lent and the ranks that may take some, in order.
  ISOLOAD_HD SpillQueue queue_up(int32_t capacity) {
    const int P = in_.R * in_.S;
    auto lends = [&](int p) {
      return view_.start[p] >= view_.min_chunk && view_.load[ws_.rank[p]] - capacity >= view_.min_excess;
    };
    team_.for_each(P, [&](int p) { ws_.index[p] = lends(p); });
    const int n = team_.scan(ws_.index, P);
    team_.for_each(P, [&](int p) {
      if (lends(p)) ws_.slots[ws_.index[p]] = p, ws_.copies[ws_.index[p]] = view_.start[p];
    });
    team_.sync();
    team_.for_each(n, [&](int i) {  // sorted by counting: needs no other lane
      const int32_t mine = ws_.copies[i];
      int before = 0;
      ISOLOAD_ROLLED
      for (int k = 0; k < i; ++k) before += ws_.copies[k] >= mine;
      ISOLOAD_ROLLED
      for (int k = i + 1; k < n; ++k) before += ws_.copies[k] > mine;
      ws_.queue[before] = ws_.slots[i];
    });
    int32_t* const spare = ws_.index;  // which has served
    team_.for_each(in_.R, [&](int r) {
      ISOLOAD_ROLLED
      for (int i = 0; i < in_.spare; ++i) spare[(in_.R - 1 - r) * in_.spare + i] = (r + 1) * in_.S - 1 - i;
    });
    team_.sync();
    return {n, ws_.queue, ws_.free, spare};
  }

  // A level that no plan is below: with its spare slots full of the largest chunks a rank still has room.
  ISOLOAD_HD int32_t least_level(int32_t capacity, const SpillQueue& queue) {
    if (view_.replicated) return capacity;  // whose ranks take copies without a spare slot
    int32_t most = 0;
    ISOLOAD_ROLLED
    for (int i = 0; i < in_.spare && i < queue.n; ++i) most += view_.start[queue.slots[i]];
    return this->lowest(capacity, ws_.reached[kept_], [&](int32_t level, int r) {
      const int32_t left = level - view_.load[r], more = queue.free[r] > 0 ? most : 0;
      return left < more ? left : more;
    });
  }

  // Keeps the plan of the level with the least load found, if that is below the plan's kept; returns whether
  // it is. Each round tries a level near the lowest one open and a higher one, which does not count if the
  // lower one was reached. A level that was missed is too low by an equal part of what is above it at least.
  ISOLOAD_HD bool seek(int32_t low, int32_t enough, const SpillQueue& queue) {
    static_assert(kLevelWays == 2, "a lane alone skips the way after one that was reached");
    bool found = false;
    int32_t least = ws_.reached[kept_];
    ISOLOAD_ROLLED
    for (int round = 0; round < kLevelRounds && least > enough && least - low > low / kLevelFine; ++round) {
      const auto span = static_cast<uint32_t>(least - low);  // of loads, below 2^31
      const int32_t lower = low + (round ? span / (kLevelWays + 1) : 0);
      const int32_t higher = low + (round ? span * 2 / (kLevelWays + 1) : span / kLevelFirst);
      const int first = way(0), second = way(1);
      team_.for_each_group(kLevelWays, [&](int k, auto& group) {
        if (k > 0 && team_.size() == 1 && ws_.reached[first] <= lower) return;
        auto attempt = level_of(group, k ? second : first, k ? higher : lower, queue);
        const int32_t reached = attempt.run(), above = attempt.copies_above();
        if (group.rank() == 0)
          ws_.reached[k ? second : first] = reached, ws_.above[k ? second : first] = above;
      });
      team_.sync();
      ISOLOAD_ROLLED
      for (int k = 0; k < kLevelWays; ++k) {
        const int state = k ? second : first;
        const int32_t level = k ? higher : lower, reached = ws_.reached[state];
        if (reached < least) least = reached, kept_ = state, found = true;
        if (reached <= level) break;
        low = level + uint32_t(ws_.above[state]) / uint32_t(in_.R) + 1;
      }
      team_.sync();  // before the levels of the next round
    }
    return found;
  }

  template <class Group>
  ISOLOAD_HD SpillLevel<Group> level_of(Group& group, int state, int32_t level,
                                        const SpillQueue& queue) const {
    return {group, view_, ws_.state(state), level, queue};
  }

  template <class Group>
  ISOLOAD_HD void try_target(Group& group, int state, int32_t target, int32_t slack, int32_t limit) {
    SpillGreedy<Group> greedy(group, view_, ws_.state(state), target);
    const int32_t reached = greedy.run(ws_.free, slack, limit);
    if (group.rank() == 0) ws_.reached[state] = reached, ws_.flags[state] = greedy.flags();
  }

  // The plan that is kept.
  ISOLOAD_HD void publish(int64_t level, int32_t flags) {
    const SpillState state = ws_.state(kept_);
    team_.for_each(in_.R * in_.S, [&](int p) {
      out_.quota[p] = state.quota[p];
      out_.slot_to_expert[p] = in_.slot_to_expert[p];
    });
    team_.sync();
    int32_t imports = 0, across = 0, most_imports = 0, most_exports = 0;
    team_.for_each(in_.R, [&](int r) {
      const int end = (r + 1) * in_.S, first = end - ws_.free[r], last = end - state.free[r];
      ISOLOAD_ROLLED
      for (int p = first; p < last; ++p) {
        const int e = out_.slot_to_expert[p] = in_.slot_to_expert[state.lender[p]];
        across += in_.per_node < in_.R && !view_.near(view_.owner(e), r);
      }
      imports += last - first;
      most_imports = last - first > most_imports ? last - first : most_imports;
      most_exports = state.exports[r] > most_exports ? state.exports[r] : most_exports;
    });
    imports = team_.sum32(imports), across = team_.sum32(across);
    most_imports = team_.max32(most_imports);
    most_exports = team_.max32(most_exports);
    if (team_.rank() == 0) {
      *out_.level = level;
      const int32_t telemetry[] = {imports, most_imports, most_exports, across, flags};
      for (int i = 0; i < 5; ++i) out_.telemetry[i] = telemetry[i];
    }
    team_.sync();  // a caller's lanes may read the result; a kernel that ends here needs no barrier
  }

  const SpillResult& out_;
  int kept_ = 0, aside_ = 1;  // states: of the best plan so far, of one to compare it with
};

struct SpillPlanner : PlannerOf<SpillProblem, SpillResult> {  // see planner.h
  ISOLOAD_HD static void select(Problem& in, Result& out, int64_t b) {
    const int64_t P = int64_t(in.R) * in.S;
    in.select(b);
    if (in.start) in.start += b * P;
    out = {out.slot_to_expert + b * P, out.quota + b * P, out.level + b, out.telemetry + b * 5};
  }
  template <int W>
  ISOLOAD_HD static int64_t bytes(const Problem& in) {
    return SpillWorkspace::bytes(in.R, in.E, int64_t(in.R) * in.S);
  }
  template <int W, class Team>
  ISOLOAD_HD static int solve(Team& team, const Problem& in, void* memory, const Result& out) {
    const auto workspace = SpillWorkspace::at(memory, in.R, in.E, int64_t(in.R) * in.S);
    return Spill<Team>(team, in, workspace, out).solve() == SpillStatus::ok ? kPlanned : 0;
  }
  template <class Team>
  ISOLOAD_HD static void refuse(Team& team, const Problem& in, const Result& out) {
    team.for_each(in.R * in.S,
                  [&](int p) { out.slot_to_expert[p] = in.slot_to_expert[p], out.quota[p] = 0; });
    team.for_each(5, [&](int i) { out.telemetry[i] = 0; });
    if (team.rank() == 0) *out.level = -1;
  }

  // Plain: no second start, no dead ranks, no nodes that lend within themselves.
  ISOLOAD_HD static bool is_plain(const Problem& in) {
    return in.start == nullptr && in.alive == nullptr && !in.within;
  }
  template <bool kPlain>
  ISOLOAD_HD static void prepare(Problem& in) {
    if (kPlain) in.start = nullptr, in.alive = nullptr, in.within = false;
    lies_in_global(in.loads), lies_in_global(in.fixed), lies_in_global(in.alive);
  }
  template <class Take>
  ISOLOAD_HD static void fetched(Problem& in, Result&, Take&& take) {
    take(in.slot_to_expert, int64_t(in.R) * in.S), take(in.home_slot, in.E);
  }
};

}  // namespace isoload
