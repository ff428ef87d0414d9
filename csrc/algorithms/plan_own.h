// plan_own: one source rank's copies over the replicas, from its own counts alone: nothing is exchanged.
//
// Minimises the sum over ranks of (base_r + y_r)^2 where y_r copies go to rank r. base_r is what this source
// is to even out: copies that rank r carries besides, an offset (from targets that ranks exchange now and
// then), and a rotation u_r in [0, 1) of the source's own. Few copies leave many equal splits; u makes every
// source choose another, else 32 of them would round to the same rank. What all send is then nearly level,
// too.
//
// Whole copies move, so fractions only order ranks that are equal else: `load` are the whole numbers, `part`
// the fractions in 2^-32. Two or more replicas are levelled class by class (replica_tables.h), over and over;
// no sweep raises the sum. Integers only, ties to the first replica: the same split on every team and device.
#pragma once

#include <cstdint>

#include "algorithms/balance.h"
#include "algorithms/quotient.h"
#include "algorithms/replica_tables.h"
#include "algorithms/start.h"
#include "host_device.h"
#include "planner.h"

namespace isoload {

// Copies of a source, at most: offsets may put all of them on each rank, and all loads together fit an int32.
ISOLOAD_HD constexpr int32_t most_own(int R) { return INT32_MAX / (R + 2); }
constexpr int kOffsetBits = 20;
constexpr int64_t kRecentLoss = 5439;  // in 2^-16: what a batch leaves of `recent` halves in eight batches

struct OwnProblem : SplitProblem {  // loads: this source's counts
  const int32_t* offset;            // [R] in 2^-20 of this source's copies, 0..2^20
  const int32_t* fixed;             // [R] copies a rank carries besides, or null
  const int32_t* ticks;             // [R] cost of one copy on a rank, 1..2^20, or null: all 1
  int64_t* recent;  // [E] decayed sums of the counts of batches, in 2^-16, which this one joins; or null
  int64_t* sent;  // [3, R] or null: decayed likewise, copies sent to ranks and fixed ones; both of this batch
  int source, layer, sweeps;  // layer: of the first of the batch; most sweeps
};

// u of a source, rank and layer in 2^-32: multiples of three irrational numbers, spread evenly in the cube.
ISOLOAD_HD inline uint32_t own_rotation(int source, int rank, int layer) {
  return uint32_t(source) * 0xc13fa9a9u + uint32_t(rank) * 0x91e10da6u + uint32_t(layer) * 0x61c88647u;
}

template <class Team>
class OwnSplit {
 public:
  ISOLOAD_HD static int64_t bytes(int64_t R, int64_t E, int64_t P) {
    return (2 * R + 3 * E + 2 * P) * int64_t(sizeof(int32_t));
  }
  ISOLOAD_HD OwnSplit(Team& team, const OwnProblem& problem, void* memory, int32_t* send)
      : team_(team), in_(problem), t_(problem.tables), by_part_(problem.tables), send_(send) {
    load_ = static_cast<int32_t*>(memory);
    part_ = reinterpret_cast<uint32_t*>(load_ + in_.R);
    int32_t* const first = load_ + 2 * in_.R;
    split_ = {first, first + in_.E, first + 2 * in_.E};
    by_part_.slots = slots_ = first + 3 * in_.E;
    by_part_.ranks = ranks_ = slots_ + in_.R * in_.S;
  }

  // Whether there is a split: not of counts that are negative, too many or of an expert without a replica.
  ISOLOAD_HD bool solve() {
    if (!add_up()) return false;
    level_all();
    if (in_.sent) note_sent();
    return true;
  }

 private:
  ISOLOAD_HD static void join(int64_t& sum, int32_t copies) {
    sum += (int64_t(copies) << 16) - (sum * kRecentLoss >> 16);
  }

  ISOLOAD_HD bool add_up() {
    int64_t copies = 0, refused = 0;
    team_.for_each(in_.R, [&](int r) {
      const int32_t offset = in_.offset[r], fixed = in_.fixed ? in_.fixed[r] : 0;
      copies += fixed;
      refused |= offset > 1 << kOffsetBits ? -1 : offset | fixed;
    });
    team_.for_each(in_.E, [&](int e) {
      copies += in_.loads[e];
      refused |= in_.loads[e] > 0 && t_.copies(e) == 0 ? -1 : in_.loads[e];
    });
    copies = team_.sum(refused < 0 ? int64_t(1) << 48 : copies);
    if (copies > most_own(in_.R)) return false;
    team_.for_each(in_.recent ? in_.E : 0, [&](int e) { join(in_.recent[e], in_.loads[e]); });
    team_.for_each_group(in_.R, [&](int r, auto& group) {
      int32_t solo = 0;
      group.for_each(in_.S, [&](int s) {
        const int p = r * in_.S + s;
        const int32_t q = t_.solo[p] >= 0 ? in_.loads[t_.solo[p]] : 0;
        send_[p] = q;
        solo += q;
      });
      solo = group.sum32(solo) + (in_.fixed ? in_.fixed[r] : 0);
      if (group.rank() > 0) return;
      const uint64_t base = uint64_t(uint32_t(in_.offset[r])) * uint64_t(copies);
      const uint64_t part =
          (base << (32 - kOffsetBits) & 0xffffffffu) + own_rotation(in_.source, r, in_.layer);
      load_[r] = solo + static_cast<int32_t>((base >> kOffsetBits) + (part >> 32));
      part_[r] = static_cast<uint32_t>(part);
    });
    team_.sync();
    return true;
  }

  // A barrier comes before: the last sweep's or, without one, the start's.
  ISOLOAD_HD void note_sent() {
    team_.for_each_group(in_.R, [&](int r, auto& group) {
      int32_t copies = 0;
      group.for_each(in_.S, [&](int s) { copies += send_[r * in_.S + s]; });
      copies = group.sum32(copies);
      if (group.rank() > 0) return;
      const int32_t fixed = in_.fixed ? in_.fixed[r] : 0;
      join(in_.sent[r], copies), join(in_.sent[in_.R + r], fixed);
      in_.sent[2 * in_.R + r] = copies + fixed;
    });
  }

  // Unequal ticks level one replica with one other, by a lane.
  ISOLOAD_HD bool is_wide(int i) const { return !in_.ticks && t_.copies(t_.order[i]) > 2; }

  template <class F, class G>
  ISOLOAD_HD void for_each_of(int begin, int end, F&& f, G&& g) {
    team_.for_each_by(
        end - begin, [&](int i) { return is_wide(begin + i); }, [&](int i) { f(begin + i); },
        [&](int i, auto& group) { g(begin + i, group); });
  }

  // Deals an expert's copies to its replicas. Where it is wide, lists them by the fractions of their ranks,
  // the least first: a copy that is left over then goes to the first that takes any.
  template <class Group>
  ISOLOAD_HD void deal(const Group& group, int i) {
    const int e = t_.order[i], first = t_.offsets[e], last = t_.offsets[e + 1];
    if (group.rank() == 0) split_.first[i] = first, split_.last[i] = last, split_.copies[i] = in_.loads[e];
    Start<Team>{team_, t_, in_.loads, load_, send_}.deal(group, e, first, last, in_.loads[e]);
    group.for_each(is_wide(i) ? last - first : 0, [&](int own) {
      const int slot = t_.slots[first + own], rank = t_.ranks[first + own];
      const uint32_t mine = part_[rank];
      int at = first;
      ISOLOAD_ROLLED
      for (int j = first; j < last; ++j) {
        const uint32_t other = part_[t_.ranks[j]];
        at += other < mine || (other == mine && j < first + own);
      }
      slots_[at] = slot, ranks_[at] = rank;
    });
  }

  // Levels every replicated expert over and over, class by class, until no class moves a copy. Nearly always
  // lanes and groups keep theirs all along: between barriers only the loads are then looked up.
  ISOLOAD_HD void level_all() {
    const int split = t_.num_split(), classes = t_.num_classes();
    struct {
      Level level;
      int of_class = -1;
    } mine, next;  // of a group
    Pair pair{};
    int of_pair = -1;
    auto class_of = [&](int i) {
      int k = 0;
      ISOLOAD_ROLLED
      while (t_.classes[k + 1] <= i) ++k;
      return k;
    };
    for_each_of(0, split, [&](int i) { deal(SerialTeam(), i); }, [&](int i, auto& group) { deal(group, i); });
    team_.sync();
    const int kept = team_.keep_by(
        in_.ticks ? 0 : split, 2, [&](int i) { return is_wide(i); },
        [&](int i) { pair = pair_at(i), of_pair = class_of(i); },
        [&](int i, auto& group) { next = mine, mine = {level_at(i, group), class_of(i)}; });
    int quiet = 0;  // classes that moved none, one after another
    for (int s = 0; s < in_.sweeps; ++s) {
      const bool far = 2 * s < in_.sweeps;
      for (int k = 0; k < classes && quiet < classes; ++k) {
        bool moved = of_pair == k && level_pair(pair, far);
        team_.for_each_group(team_.groups(), [&](int, auto& group) {
          ISOLOAD_ROLLED
          for (int turn = 0; turn < 2; ++turn) {
            if (mine.of_class == k) moved |= balance_level(group, by_part_, mine.level, load_, send_);
            const auto done = mine;
            mine = next, next = done;
          }
        });
        if (kept < split)
          for_each_of(
              t_.classes[k] > kept ? t_.classes[k] : kept, t_.classes[k + 1],
              [&](int i) {
                Pair pair = pair_at(i);
                moved |= in_.ticks ? level_costs(split_.first[i], split_.last[i]) : level_pair(pair, far);
              },
              [&](int i, auto& group) {
                Level level = level_at(i, group);
                moved |= balance_level(group, by_part_, level, load_, send_);
              });
        quiet = team_.any_lane(moved) ? 0 : quiet + 1;
      }
    }
  }

  template <class Group>
  ISOLOAD_HD Level level_at(int i, const Group& group) const {
    const int first = split_.first[i];
    const uint32_t inverse = Divisor(group.rank() + 1).inverse;
    return Level::of(group, by_part_, first, split_.last[i] - first, split_.copies[i], send_, inverse);
  }

  struct Pair {
    int slot0, slot1, rank0, rank1;
    int32_t q0, q1;
  };
  ISOLOAD_HD Pair pair_at(int i) const {
    const int j = split_.first[i], slot0 = t_.slots[j], slot1 = t_.slots[j + 1];
    return {slot0, slot1, t_.ranks[j], t_.ranks[j + 1], send_[slot0], send_[slot1]};
  }

  // Two replicas. far: past the level, see balance_pair.
  ISOLOAD_HD bool level_pair(Pair& p, bool far) {
    const int32_t load0 = load_[p.rank0], load1 = load_[p.rank1], gap = load1 - load0;
    int32_t move = (gap >> 1) + ((gap & 1) && part_[p.rank1] > part_[p.rank0]);  // from 1 to 0
    if (far && (gap > kWide || gap < -kWide)) move = static_cast<int32_t>(7 * int64_t(gap) / 10);
    move = move > p.q1 ? p.q1 : move < -p.q0 ? -p.q0 : move;
    if (move == 0) return false;
    send_[p.slot0] = p.q0 += move, load_[p.rank0] = load0 + move;
    send_[p.slot1] = p.q1 -= move, load_[p.rank1] = load1 - move;
    return true;
  }

  // Unequal ticks: from the costliest replica to the cheapest, as near to equal cost as whole copies come.
  ISOLOAD_HD bool level_costs(int first, int last) {
    auto cost = [&](int j) {  // in 2^-8 copies
      const int r = t_.ranks[j];
      return in_.ticks[r] * (int64_t(load_[r]) * 256 + (part_[r] >> 24));
    };
    int low = first, high = -1;
    ISOLOAD_ROLLED
    for (int j = first; j < last; ++j) {
      if (cost(j) < cost(low)) low = j;
      if (send_[t_.slots[j]] > 0 && (high < 0 || cost(j) > cost(high))) high = j;
    }
    if (high < 0 || cost(high) <= cost(low)) return false;
    const int64_t both = 256 * int64_t(in_.ticks[t_.ranks[high]] + in_.ticks[t_.ranks[low]]);
    int32_t &giver = send_[t_.slots[high]], &taker = send_[t_.slots[low]];
    const int64_t move = quotient_of_large(cost(high) - cost(low) + both / 2 - 1, both);
    const int32_t moved = static_cast<int32_t>(move > giver ? giver : move);
    giver -= moved, load_[t_.ranks[high]] -= moved;
    taker += moved, load_[t_.ranks[low]] += moved;
    return moved != 0;
  }

  static constexpr int32_t kWide = 8;  // a gap that is worth to go past its middle
  Team& team_;
  const OwnProblem& in_;
  const ReplicaTables t_;
  ReplicaTables by_part_;    // with these lists
  int32_t *slots_, *ranks_;  // [P]
  int32_t* const send_;
  int32_t* load_;     // [R]
  uint32_t* part_;    // [R]
  Replicated split_;  // [E]
};

struct OwnPlanner
    : PlannerOf<OwnProblem, int32_t*> {  // see planner.h; [P] copies that the source sends to each slot
  ISOLOAD_HD static void select(Problem& in, Result& out, int64_t b) {
    const int64_t R = in.R;
    in.SplitProblem::select(b);
    in.offset += b * R, in.layer += static_cast<int>(b);
    if (in.fixed) in.fixed += b * R;
    if (in.recent) in.recent += b * in.E;
    if (in.sent) in.sent += 3 * b * R;
    out += b * R * in.S;
  }
  template <int W>
  ISOLOAD_HD static int64_t bytes(const Problem& in) {
    return OwnSplit<SerialTeam>::bytes(in.R, in.E, int64_t(in.R) * in.S);
  }
  template <int W, class Team>
  ISOLOAD_HD static int solve(Team& team, const Problem& in, void* memory, Result out) {
    return OwnSplit<Team>(team, in, memory, out).solve() ? kPlanned : 0;
  }
  template <class Team>
  ISOLOAD_HD static void refuse(Team& team, const Problem& in, Result out) {
    team.for_each(in.R * in.S, [&](int p) { out[p] = 0; });
  }
};

}  // namespace isoload
