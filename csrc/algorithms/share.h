// share: how many of each replica's quota come from each source rank. Every rank computes its own row from
// the gathered loads, so the whole group realises the quota exactly without a word between the ranks.
//
// Sources and replicas are laid on two number lines by prefix sums; a source sends to a replica what their
// intervals have in common. With locality this is done three times, on what the time before left over: a rank
// with itself, the ranks of one node, all ranks. Each level matches the most copies the quota permits, hence
// local and node-local copies are the most possible. Without it (rank_major) one pass over all ranks is made,
// which gives each replica one contiguous range of the expert's copies in source order.
//
// The interval of one source needs no other source's result: a rank computes its own row alone. Where all
// rows are wanted, a lane walks both lines of an expert at once instead, and every copy is looked at once.
#pragma once

#include <cstdint>

#include "algorithms/replica_tables.h"
#include "host_device.h"
#include "planner.h"

namespace isoload {

// A rank's row [P], all rows [R, P], or all rows summed over each rank's slots [R, R].
enum class ShareOf { one_row, all_rows, all_ranks };

struct ShareProblem {
  int R, E, S;
  int per_node;  // ranks of a node; R if locality is off: then the only node is all of them
  bool locality;
  ReplicaTables tables;
  const int32_t* loads;  // [R, E] copies per source rank and expert
  const int32_t* quota;  // [P]

  // Of SharePlanner: what is wanted, the source of the one row; peaks [1]: of the plan that has just made the
  // quota, -1 where it was refused, whose share is 0 then, or null, and the quota is checked.
  ShareOf of = ShareOf::one_row;
  int rank = 0;
  const int64_t* peaks = nullptr;
  bool spent = false;  // whether the loads may be used up
};

// Caller's memory in int32: what every replica still takes from the others, [P], once it took what it could
// from its own rank, [P]; copies per node and expert, [R / per_node, E].
ISOLOAD_HD inline int64_t share_workspace(const ShareProblem& in) {
  return 2 * int64_t(in.R) * in.S + int64_t(in.R / in.per_node) * in.E;
}

// The part of [start, start + length) that lies in [other, other + size).
ISOLOAD_HD inline int32_t overlap(int32_t start, int32_t length, int32_t other, int32_t size) {
  const int32_t low = start > other ? start : other;
  const int32_t high = start + length < other + size ? start + length : other + size;
  return high > low ? high - low : 0;
}

template <class Team>
class Share {
 public:
  ISOLOAD_HD Share(Team& team, const ShareProblem& problem, int32_t* workspace)
      : team_(team),
        in_(problem),
        t_(problem.tables),
        room_(workspace),
        own_(room_ + int64_t(problem.R) * problem.S),
        added_(own_ + int64_t(problem.R) * problem.S),
        node_loads_(added_) {}

  // An expert with a negative load or quota, or whose quotas do not sum to its load; -1 if there is none. To
  // be called first.
  ISOLOAD_HD int check() {
    int32_t sign = add_up_nodes();
    team_.for_each(in_.R * in_.S, [&](int p) { sign |= in_.quota[p]; });
    negative_ = team_.any(sign < 0) != 0;
    return find_unlike();
  }

  // In place of check(), where the quota was just made from the loads; one_row() comes next. totals [E]: sums
  // over all sources, or null.
  ISOLOAD_HD void trust(const int32_t* totals = nullptr) {
    if (totals && in_.per_node == in_.R)
      node_loads_ = totals;
    else
      add_up_nodes();
  }

  // What source rank s sends to every slot, onto row [P].
  ISOLOAD_HD void one_row(int s, int32_t* row) {
    team_.for_each(in_.R * in_.S, [&](int p) { row[p] = t_.solo[p] < 0 ? 0 : load(s, t_.solo[p]); });
    for_each_replica([&](int i, int j) { own_[j] = own_part(i, j); });
    team_.sync();
    team_.for_each(t_.num_split(), [&](int i) { send(s, t_.order[i], row); });
    team_.sync();
  }

  // What all source ranks send to every slot, onto out [R, P]. left [R, E]: memory for what sources still
  // have; the loads' own, where they may be used up. No barrier at the end.
  ISOLOAD_HD void all_rows(int32_t* out, int32_t* left) {
    const int P = in_.R * in_.S;
    for (int s = 0; s < in_.R; ++s)
      team_.for_each(P, [&](int p) { out[s * P + p] = t_.solo[p] < 0 ? 0 : load(s, t_.solo[p]); });
    deal_all(left, [&](int s, int j, int32_t copies) { out[int64_t(s) * P + t_.slots[j]] += copies; });
  }

  // What all source ranks send to every rank, onto out [R, R]; left and the end as above.
  ISOLOAD_HD void all_ranks(int32_t* out, int32_t* left) {
    all_ranks(out, left, [](int, int, int32_t) {});
  }

  // And give(s, j, copies) from source s to replica j, of replicated experts. Where the quota is trusted, the
  // first [P] of the workspace do.
  template <class Give>
  ISOLOAD_HD void all_ranks(int32_t* out, int32_t* left, Give&& give) {
    const int R = in_.R, S = in_.S;
    constexpr int kRows = 4;  // sources at a time, so that a slot is looked up once for all of them
    team_.for_each((R + kRows - 1) / kRows * R, [&](int i) {
      const int first = uint32_t(i) / uint32_t(R) * kRows, d = uint32_t(i) % uint32_t(R), rows = R - first;
      int32_t copies[kRows] = {};
      const int32_t* const loads = in_.loads + int64_t(first) * in_.E;
      ISOLOAD_ROLLED
      for (int p = d * S; p < d * S + S; ++p) {
        const int e = t_.solo[p];
        if (e < 0) continue;
        for (int k = 0; k < kRows; ++k) copies[k] += loads[int64_t(k < rows ? k : 0) * in_.E + e];
      }
      for (int k = 0; k < kRows; ++k)
        if (k < rows) out[int64_t(first + k) * R + d] = copies[k];
    });
    deal_all(left, [&](int s, int j, int32_t copies) {
      team_.add(&out[int64_t(s) * R + t_.ranks[j]], copies);  // experts of several lanes meet in one cell
      give(s, j, copies);
    });
  }

 private:
  ISOLOAD_HD int32_t load(int s, int e) const { return in_.loads[int64_t(s) * in_.E + e]; }
  ISOLOAD_HD int32_t sum_of(int s, int end, int e) const {
    int32_t copies = 0;
    ISOLOAD_UNROLLED(4)
    for (; s < end; ++s) copies += load(s, e);
    return copies;
  }
  ISOLOAD_HD int32_t node_load(int node, int e) const { return node_loads_[int64_t(node) * in_.E + e]; }

  // Negative where one of this lane's loads is.
  ISOLOAD_HD int32_t add_up_nodes() {
    int32_t sign = 0;
    const int64_t rows = in_.per_node, E = in_.E;
    for (int node = 0; node < in_.R / in_.per_node; ++node)
      sign |= team_.column_sums(in_.loads + node * rows * E, in_.per_node, in_.E, added_ + node * E).any_row;
    return sign;
  }

  ISOLOAD_HD int find_unlike() {
    int64_t bad = 0;  // E - e of the lowest such expert
    team_.for_each(in_.E, [&](int e) {
      int64_t left = 0;
      for (int node = 0; node < in_.R / in_.per_node; ++node) left += node_load(node, e);
      ISOLOAD_ROLLED
      for (int j = t_.offsets[e]; j < t_.offsets[e + 1]; ++j) left -= in_.quota[t_.slots[j]];
      if (left != 0 || (negative_ && has_negative(e))) bad = bad > in_.E - e ? bad : in_.E - e;
    });
    bad = team_.max(bad);
    return bad > 0 ? static_cast<int>(in_.E - bad) : -1;
  }

  ISOLOAD_HD bool has_negative(int e) const {
    bool found = false;
    ISOLOAD_ROLLED
    for (int s = 0; s < in_.R; ++s) found |= load(s, e) < 0;
    ISOLOAD_ROLLED
    for (int j = t_.offsets[e]; j < t_.offsets[e + 1]; ++j) found |= in_.quota[t_.slots[j]] < 0;
    return found;
  }

  // Every source serves its own rank, then its node, then all. give(s, j, copies) from source s to replica j,
  // behind a barrier; none at the end.
  template <class Give>
  ISOLOAD_HD void deal_all(int32_t* left, Give&& give) {
    const int64_t E = in_.E;
    for (int s = 0; s < in_.R && left != in_.loads; ++s)
      team_.for_each(t_.num_split(), [&](int i) { left[s * E + t_.order[i]] = load(s, t_.order[i]); });
    team_.sync();
    for_each_replica([&](int i, int j) {
      const int s = t_.ranks[j];
      const int32_t served = own_part(i, j);
      if (served == 0) return;
      left[s * E + t_.order[i]] -= served;
      give(s, j, served);
    });
    team_.sync();
    team_.for_each(t_.num_split(), [&](int i) {
      const int e = t_.order[i], last = t_.offsets[e + 1];
      ISOLOAD_ROLLED
      for (int size = in_.per_node;; size = in_.R) {  // groups of so many ranks
        ISOLOAD_ROLLED
        for (int j = t_.offsets[e]; j < last;) {
          const int begin = j, low = uint32_t(t_.ranks[j]) / uint32_t(size) * size;
          while (++j < last && t_.ranks[j] < low + size) continue;
          walk(left + e, low, low + size, begin, j, give);
        }
        if (size == in_.R) break;
      }
    });
  }

  // Sources [s, s_end) fill replicas [j, j_end), both lowest first, as far as both last. left: a source's
  // copies are at s * E.
  template <class Give>
  ISOLOAD_HD void walk(int32_t* left, int s, int s_end, int j, int j_end, Give&& give) {
    int32_t *source = left + int64_t(s) * in_.E, copies = *source, room = room_[j];
    ISOLOAD_ROLLED
    for (;;) {
      const int32_t sent = copies < room ? copies : room;
      copies -= sent, room -= sent;
      if (sent > 0) give(s, j, sent);
      if (copies == 0) {
        *source = 0;
        if (++s == s_end) break;
        source += in_.E, copies = *source;
      } else {
        room_[j] = 0;
        if (++j == j_end) break;
        room = room_[j];
      }
    }
    if (j < j_end)
      room_[j] = room;
    else
      *source = copies;
  }

  // f(i, j): replica j is one of the expert `i` of the order; of replicated experts only.
  template <class F>
  ISOLOAD_HD void for_each_replica(F&& f) {
    if (team_.size() == 1) {  // one lane need not look at the others
      for (int i = 0; i < t_.num_split(); ++i)
        for (int e = t_.order[i], j = t_.offsets[e]; j < t_.offsets[e + 1]; ++j) f(i, j);
    } else {
      team_.for_each(t_.offsets[in_.E], [&](int j) {
        if (const int i = t_.split[t_.slots[j]]; i >= 0) f(i, j);
      });
    }
  }

  // What replica j of the expert `i` of the order takes from its own rank; room: what is then left of its
  // quota.
  ISOLOAD_HD int32_t own_part(int i, int j) {
    const int32_t n = in_.locality ? load(t_.ranks[j], t_.order[i]) : 0, quota = in_.quota[t_.slots[j]];
    const int32_t own = n < quota ? n : quota;
    room_[j] = quota - own;
    return own;
  }

  // A node's part of expert e once every rank has served itself.
  struct Node {
    int node, begin, end;       // its replicas
    int32_t sources, replicas;  // copies that its sources have left, that its replicas still take
  };
  // begin: the first replica on this node or after it.
  ISOLOAD_HD Node visit(int e, int node, int begin) const {
    Node n{node, begin, begin, node_load(node, e), 0};
    ISOLOAD_ROLLED
    for (; n.end < t_.offsets[e + 1] && t_.ranks[n.end] < (node + 1) * in_.per_node; ++n.end) {
      n.sources -= own_[n.end];
      n.replicas += room_[n.end];
    }
    return n;
  }

  // Source s's copies of the replicated expert e, onto its row of the share: to its own rank, then its node,
  // then the others.
  ISOLOAD_HD void send(int s, int e, int32_t* row) {
    const int node = s / in_.per_node, first = t_.offsets[e], last = t_.offsets[e + 1];
    int32_t n = load(s, e);
    if (n == 0) return;
    int begin = first;
    while (begin < last && t_.ranks[begin] < node * in_.per_node) ++begin;
    const Node here = visit(e, node, begin);
    int32_t start = sum_of(node * in_.per_node, s, e);  // where s begins on the line of its node's sources
    ISOLOAD_ROLLED
    for (int j = here.begin; j < here.end && t_.ranks[j] <= s; ++j)
      t_.ranks[j] < s ? start -= own_[j] : n -= own_[j];
    int32_t taken = 0;
    ISOLOAD_ROLLED
    for (int j = here.begin; j < here.end; taken += room_[j++]) {
      row[t_.slots[j]] = overlap(start, n, taken, room_[j]) + (t_.ranks[j] == s ? own_[j] : 0);
    }
    const int32_t rest = n - overlap(start, n, 0, here.replicas);
    if (rest > 0) send_afar(e, here, start > here.replicas ? start - here.replicas : 0, rest, row);
  }

  // What the own node could not take, to replicas on others: `rest` copies from `start` on the line of the
  // copies that it, and the nodes before it, are left with. Its own replicas are full then.
  ISOLOAD_HD void send_afar(int e, const Node& here, int32_t start, int32_t rest, int32_t* row) {
    const int first = t_.offsets[e], last = t_.offsets[e + 1];
    ISOLOAD_ROLLED
    for (int other = 0, j = first; other < here.node; ++other) {
      const Node there = visit(e, other, j);
      if (there.sources > there.replicas) start += there.sources - there.replicas;
      j = there.end;
    }
    int32_t offered = 0;
    ISOLOAD_ROLLED
    for (int j = first; j < last;) {
      const int node = t_.ranks[j] / in_.per_node;
      const Node there = node == here.node ? here : visit(e, node, j);
      int32_t taken = 0;
      ISOLOAD_ROLLED
      for (; j < there.end; taken += room_[j++]) {
        if (node == here.node) continue;
        const int32_t left = room_[j] - overlap(taken, room_[j], 0, there.sources);
        row[t_.slots[j]] = overlap(start, rest, offered, left);
        offered += left;
      }
    }
  }

  Team& team_;
  const ShareProblem& in_;
  const ReplicaTables t_;
  int32_t *const room_, *const own_, *const added_;
  const int32_t* node_loads_;  // those added up, or of one node the caller's
  bool negative_ = false;
};

struct SharePlanner : PlannerOf<ShareProblem, int32_t*> {  // see planner.h
  ISOLOAD_HD static int64_t size(const Problem& in) {      // of a result
    const int64_t R = in.R, P = R * in.S;
    return in.of == ShareOf::one_row ? P : in.of == ShareOf::all_rows ? R * P : R * R;
  }
  ISOLOAD_HD static void select(Problem& in, Result& out, int64_t b) {
    const int64_t E = in.E, R = in.R, P = R * in.S;
    in.tables = in.tables.layer(b, E, P);
    in.loads += b * R * E;
    in.quota += b * P;
    if (in.peaks) in.peaks += b;
    out += b * size(in);
  }
  template <int W>
  ISOLOAD_HD static int64_t bytes(const Problem& in) {
    const bool left = in.of != ShareOf::one_row && !in.spent;
    return (share_workspace(in) + (left ? int64_t(in.R) * in.E : 0)) * int64_t(sizeof(int32_t));
  }
  // The expert whose quota was not made from its loads. No barrier last: no lane reads the result.
  template <int W, class Team>
  ISOLOAD_HD static int solve(Team& team, const Problem& in, void* memory, Result out) {
    auto* const workspace = static_cast<int32_t*>(memory);
    Share<Team> share(team, in, workspace);
    if (in.peaks == nullptr) {
      if (const int bad = share.check(); bad >= 0) return bad;
    } else if (*in.peaks < 0) {  // which has been told
      return refuse(team, in, out), kPlanned;
    } else {
      share.trust();
    }
    int32_t* const left = in.spent ? const_cast<int32_t*>(in.loads) : workspace + share_workspace(in);
    if (in.of == ShareOf::one_row)
      share.one_row(in.rank, out);
    else if (in.of == ShareOf::all_rows)
      share.all_rows(out, left);
    else
      share.all_ranks(out, left);
    return kPlanned;
  }
  template <class Team>
  ISOLOAD_HD static void refuse(Team& team, const Problem& in, Result out) {
    team.for_each(static_cast<int>(size(in)), [&](int i) { out[i] = 0; });
  }

  // Fetched: see planner.h. Plain is one row.
  ISOLOAD_HD static bool is_plain(const Problem& in) { return in.of == ShareOf::one_row; }
  template <bool kPlain>
  ISOLOAD_HD static void prepare(Problem& in) {
    if (kPlain) in.of = ShareOf::one_row;
    in.spent = true;
  }
  template <class Take>
  ISOLOAD_HD static void fetched(Problem& in, Result&, Take&& take) {
    const int64_t E = in.E, P = int64_t(in.R) * in.S;
    take(in.loads, in.R * E), take(in.quota, P), in.tables.fetched(E, P, take);
  }
};

}  // namespace isoload
