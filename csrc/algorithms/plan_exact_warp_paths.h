// plan_exact's paths where 32 lanes can keep what they need in registers: a lane has up to kOwn replicated
// experts, i % 32, and as many ranks. The same paths as ExactPaths finds, without a barrier on the way: an
// expert's quota is read and written by its own lane alone.
#pragma once

#include <climits>
#include <cstdint>
#include <type_traits>

#include "algorithms/plan_exact_parts.h"
#include "algorithms/quotient.h"
#include "host_device.h"
#include "rank_set.h"

namespace isoload {

template <class Group, int kOwn>
class WarpPaths {
  using Set = std::conditional_t<kOwn == 1, uint32_t, uint64_t>;  // of ranks
  static constexpr int kLanes = 32, kBits = kOwn * kLanes;

 public:
  static_assert(kOwn == 1 || kOwn == 2, "a set of ranks is one word");
  ISOLOAD_HD static bool takes(const ExactProblem& in) {
    return Group::kLanes == kLanes && in.R <= kBits && in.tables.num_split() <= kBits;
  }

  ISOLOAD_HD WarpPaths(Group& group, const ExactProblem& problem, ExactWorkspace<1> workspace, int32_t* quota)
      : group_(group), in_(problem), t_(problem.tables), ws_(workspace), quota_(quota) {
    each_own([&](int j, int r) { load_[j] = r < in_.R ? ws_.load[r] : 0, hop_[j] = -1; });
  }

  ISOLOAD_HD void list_ranks() {
    const int n = t_.num_split();
    each_own([&](int j, int i) {
      first_[j] = i < n ? ws_.split.first[i] : 0;
      const int last = i < n ? ws_.split.last[i] : 0;
      ISOLOAD_BY_FOUR
      for (int k = first_[j]; k < last; ++k) {
        holders_[j] |= one(t_.ranks[k]);
        givers_[j] |= Set(quota_[t_.slots[k]] > 0) << t_.ranks[k];
      }
    });
  }

  // What each rank may carry, who carries more, who less.
  ISOLOAD_HD void aim(int64_t target) {
    over_ = under_ = 0;
    each_own([&](int j, int r) {
      const int64_t room = in_.ticks && r < in_.R ? quotient(target, in_.ticks[r]) : target;
      cap_[j] = r < in_.R ? static_cast<int32_t>(room < INT32_MAX ? room : INT32_MAX) : 0;
      over_ |= Set(group_.lanes_with(load_[j] > cap_[j])) << j * kLanes;
      under_ |= Set(group_.lanes_with(load_[j] < cap_[j])) << j * kLanes;
    });
  }
  ISOLOAD_HD bool is_above() const { return over_ != 0; }

  // As ExactPaths::search; what it has reached is kept.
  ISOLOAD_HD int search(bool forward) {
    Set frontier = reached_ = forward ? over_ : under_;
    for (int depth = 0;; ++depth) {
      if (!forward && (frontier & over_)) {
        source_ = lowest_one(frontier & over_);
        return depth;
      }
      if (group_.rank() == 0) ws_.levels[depth].word[0] = frontier;
      Set next = 0;
      each_own([&](int j, int) {
        const Set by = forward ? givers_[j] : holders_[j], to = forward ? holders_[j] : givers_[j];
        next |= by & frontier ? to : 0;
      });
      next = static_cast<Set>(group_.any(next, kBits)) & ~reached_;  // and the level is there for all
      if (!next) return -1;
      reached_ |= next;
      frontier = next;
    }
  }

  // As ExactPaths::certify.
  ISOLOAD_HD int64_t certify() {
    int32_t copies = 0;
    each_own([&](int j, int r) { copies += reached_ >> r & 1 ? load_[j] : 0; });
    RankSet<1> closed;
    closed.word[0] = reached_;
    return smallest_peak(group_, in_.ticks, in_.R, group_.sum32(copies), count_ones(reached_), closed,
                         ws_.found);
  }

  // As ExactPaths::follow.
  ISOLOAD_HD void follow(int depth) {
    const int32_t excess = -room_of(source_);
    int32_t width = excess, room = 0;
    int u = source_;
    ISOLOAD_ROLLED
    for (int k = depth; k > 0; --k) {
      const Set below = k == 1 ? under_ : static_cast<Set>(ws_.levels[k - 1].word[0]);
      const int i = widest(u, below, width), at = i / kLanes;
      Set ends = of(i, holders_[0]);
      if (kOwn == 2 && at == 1) ends = of(i, holders_[kOwn - 1]);
      const int v = k == 1 ? roomiest(ends & below, room) : lowest_one(ends & below);
      each_own([&](int j, int own) {
        if (own == i) hop_[j] = u | v << 8, to_[j] = t_.slots[place(j, v)];
      });
      u = v;
    }
    width = room < width ? room : width;
    each_own([&](int j, int r) {
      if (hop_[j] >= 0) move(j, width);
      load_[j] += (r == u ? width : 0) - (r == source_ ? width : 0);
    });
    group_.sync();  // all have read the levels
    if (width == excess) over_ ^= one(source_);
    if (width == room) under_ ^= one(u);
  }

  // What others read behind it.
  ISOLOAD_HD void finish() {
    each_own([&](int j, int r) {
      if (r < in_.R) ws_.load[r] = load_[j], ws_.cap[r] = cap_[j];
    });
  }

 private:
  // f(j, i): the lane's own of the 64 experts, or ranks.
  template <class F>
  ISOLOAD_HD void each_own(F&& f) {
    ISOLOAD_UNROLLED(2)
    for (int j = 0; j < kOwn; ++j) f(j, group_.rank() + j * kLanes);
  }
  ISOLOAD_HD static Set one(int r) { return Set(1) << r; }
  ISOLOAD_HD int place(int j, int r) const { return first_[j] + count_ones(holders_[j] & (one(r) - 1)); }

  // What the lane of i has.
  ISOLOAD_HD int of(int i, int v) const { return group_.from_lane_of(i, v); }
  ISOLOAD_HD uint32_t of(int i, uint32_t v) const { return group_.from_lane_of(i, static_cast<int>(v)); }
  ISOLOAD_HD uint64_t of(int i, uint64_t v) const {
    return uint64_t(of(i, uint32_t(v >> 32))) << 32 | of(i, uint32_t(v));
  }
  ISOLOAD_HD int32_t room_of(int r) const {
    const int32_t first = of(r, cap_[0] - load_[0]);
    return kOwn == 1 || r < kLanes ? first : of(r, cap_[kOwn - 1] - load_[kOwn - 1]);
  }

  // The largest `mine` of all lanes, and the lowest number that has it: the lane's own, `own` * 32 further.
  ISOLOAD_HD int32_t largest(int32_t mine, int own, int& at) const {
    const int32_t most = group_.max32(mine);
    uint32_t lanes = group_.lanes_with(mine == most && own == 0);
    at = 0;
    if (kOwn == 2 && !lanes) at = kLanes, lanes = group_.lanes_with(mine == most);
    at += lowest_one(lanes);
    return most;
  }

  // The expert that can hand most copies from u to `level`, then the lowest in order; width: as many at most.
  ISOLOAD_HD int widest(int u, Set level, int32_t& width) {
    int32_t most = 0;
    int own = 0, at;
    each_own([&](int j, int) {
      if (!(givers_[j] >> u & 1) || !(holders_[j] & level)) return;
      const int slot = t_.slots[place(j, u)];
      if (quota_[slot] > most) most = quota_[slot], own = j;
      from_[j] = slot;
    });
    most = largest(most, own, at);
    width = most < width ? most : width;
    return at;
  }

  // Of a set the rank with most room, then the lowest.
  ISOLOAD_HD int roomiest(Set ranks, int32_t& room) const {
    int32_t most = 0;
    int own = 0, at;
    ISOLOAD_UNROLLED(2)
    for (int j = 0; j < kOwn; ++j) {
      const int32_t here = ranks >> (group_.rank() + j * kLanes) & 1 ? cap_[j] - load_[j] : 0;
      if (here > most) most = here, own = j;
    }
    room = largest(most, own, at);
    return at;
  }

  // Along the hop that is kept of the lane's expert j. No other hop is of this expert.
  ISOLOAD_HD void move(int j, int32_t copies) {
    quota_[to_[j]] += copies;
    givers_[j] |= one(hop_[j] >> 8);
    if ((quota_[from_[j]] -= copies) == 0) givers_[j] &= ~one(hop_[j] & 0xff);
    hop_[j] = -1;
  }

  Group& group_;
  const ExactProblem& in_;
  const ReplicaTables t_;
  const ExactWorkspace<1> ws_;
  int32_t* const quota_;
  int32_t load_[kOwn], cap_[kOwn];              // of its ranks; 0 beyond the last
  Set holders_[kOwn] = {}, givers_[kOwn] = {};  // of its experts: ranks, and those with quota > 0
  int first_[kOwn] = {};                        // and its replicas' place in the tables
  int hop_[kOwn], from_[kOwn], to_[kOwn];       // on this path: from a rank to one << 8, or -1; its slots
  Set over_ = 0, under_ = 0, reached_ = 0;      // ranks above the target, below it; seen by a search
  int source_ = 0;                              // of the next path
};

}  // namespace isoload
