// replica_tables: who holds what, derived from slot_to_expert [P] into one fixed-size buffer per layer.
//
// All planners and routers read these tables and nothing else about a placement. Slots p = r*S .. r*S+S-1
// live on rank r. Two slots of one expert on one rank are merged into the lowest: the others appear in no
// list and always get quota 0. A "split" expert has replicas on two or more ranks; a "solo" slot holds an
// expert's only one.
#pragma once

#include <cstdint>

#include "host_device.h"
#include "planner.h"

namespace isoload {

// Views into one layer's buffer of ReplicaTables::size(E, P) int32. python/isoload/replica_tables.py names
// the same fields.
template <class Int>
struct BasicReplicaTables {
  Int* header;   // [2]     number of replicated experts, number of classes
  Int* offsets;  // [E+1]   expert e's replicas are slots[offsets[e] .. offsets[e+1])
  Int* slots;    // [P]     replicas of every expert, ascending slot; unused tail -1
  Int* ranks;    // [P]     rank of slots[j]; unused tail -1
  Int* solo;     // [P]     the expert whose only replica slot p is, else -1
  Int* split;    // [P]     index into order of the replicated expert that slot p holds, else -1
  Int* order;    // [E]     replicated experts, class by class; unused tail -1
  Int* classes;  // [E+1]   class k is order[classes[k] .. classes[k+1]); its experts share no rank

  ISOLOAD_HD static constexpr int64_t size(int64_t E, int64_t P) { return 2 + (E + 1) + 4 * P + E + (E + 1); }

  ISOLOAD_HD static BasicReplicaTables at(Int* data, int64_t E, int64_t P) {
    BasicReplicaTables t;
    t.header = data;
    t.offsets = t.header + 2;
    t.slots = t.offsets + E + 1;
    t.ranks = t.slots + P;
    t.solo = t.ranks + P;
    t.split = t.solo + P;
    t.order = t.split + P;
    t.classes = t.order + E;
    return t;
  }
  ISOLOAD_HD BasicReplicaTables layer(int64_t b, int64_t E, int64_t P) const {
    return at(header + b * size(E, P), E, P);
  }
  ISOLOAD_HD int num_split() const { return header[0]; }
  ISOLOAD_HD int num_classes() const { return header[1]; }
  ISOLOAD_HD int copies(int e) const { return offsets[e + 1] - offsets[e]; }
};
using ReplicaTables = BasicReplicaTables<const int32_t>;
using MutableReplicaTables = BasicReplicaTables<int32_t>;

// Rank sets of the classes while they are being coloured: words per class.
ISOLOAD_HD inline int64_t replica_tables_workspace(int64_t R, int64_t E) { return E * ((R + 63) / 64); }

// Replicas of each expert: counted, scanned, filled in any order, then sorted by slot.
template <class Team>
ISOLOAD_HD void list_replicas(Team& team, const int32_t* slot_to_expert, int R, int E, int S,
                              MutableReplicaTables t) {
  const int P = R * S;
  team.for_each(E + 1, [&](int e) { t.offsets[e] = 0; });
  team.for_each(E, [&](int e) { t.order[e] = 0; });  // replicas of e filled in so far
  team.sync();
  // solo[p] = 1 marks the slots that count: not empty, and the first of their expert on their rank.
  team.for_each(R, [&](int r) {
    for (int p = r * S; p < r * S + S; ++p) {
      const int e = slot_to_expert[p];
      bool first = e >= 0 && e < E;
      for (int q = r * S; first && q < p; ++q) first = slot_to_expert[q] != e;
      t.solo[p] = first;
      t.slots[p] = t.ranks[p] = t.split[p] = -1;
      if (first) team.add(&t.offsets[e], 1);
    }
  });
  team.sync();
  team.scan(t.offsets, E + 1);
  team.for_each(P, [&](int p) {
    if (t.solo[p]) t.slots[t.offsets[slot_to_expert[p]] + team.add(&t.order[slot_to_expert[p]], 1)] = p;
  });
  team.sync();
  team.for_each(E, [&](int e) {
    const int first = t.offsets[e], last = t.offsets[e + 1];
    for (int j = first + 1; j < last; ++j) {  // insertion sort: lanes filled the list in any order
      const int slot = t.slots[j];
      int k = j;
      for (; k > first && t.slots[k - 1] > slot; --k) t.slots[k] = t.slots[k - 1];
      t.slots[k] = slot;
    }
    for (int j = first; j < last; ++j) t.ranks[j] = t.slots[j] / S;
  });
  team.sync();
}

// Greedy colouring in expert order: a class takes an expert if they share no rank, so the lanes of a team may
// balance the experts of one class at the same time. Sequential over experts, parallel over classes.
template <class Team>
ISOLOAD_HD int colour_experts(Team& team, int R, int E, MutableReplicaTables t, int32_t* colour,
                              uint64_t* class_ranks) {
  const int W = (R + 63) / 64;
  int num_classes = 0;
  for (int e = 0; e < E; ++e) {
    if (t.copies(e) < 2) continue;
    int mine = num_classes;
    team.for_each(num_classes, [&](int k) {
      bool free = k < mine;
      for (int j = t.offsets[e]; free && j < t.offsets[e + 1]; ++j)
        free = !(class_ranks[k * W + t.ranks[j] / 64] >> (t.ranks[j] % 64) & 1);
      if (free) mine = k;
    });
    const int chosen = -static_cast<int>(team.max(-mine));
    if (team.rank() == 0) {
      colour[e] = chosen;
      for (int w = 0; chosen == num_classes && w < W; ++w) class_ranks[chosen * W + w] = 0;
      for (int j = t.offsets[e]; j < t.offsets[e + 1]; ++j)
        class_ranks[chosen * W + t.ranks[j] / 64] |= uint64_t(1) << (t.ranks[j] % 64);
    }
    if (chosen == num_classes) ++num_classes;
    team.sync();
  }
  return num_classes;
}

// slot_to_expert [P] with -1 = empty -> tables. workspace: replica_tables_workspace() words, any content.
template <class Team>
ISOLOAD_HD void replica_tables(Team& team, const int32_t* slot_to_expert, int R, int E, int S,
                               MutableReplicaTables t, uint64_t* workspace) {
  const int P = R * S;
  list_replicas(team, slot_to_expert, R, E, S, t);
  int32_t* colour = t.classes;  // [E], replaced by the class offsets below
  const int num_classes = colour_experts(team, R, E, t, colour, workspace);
  team.for_each(P, [&](int p) {
    const bool counts = t.solo[p];
    t.solo[p] = counts && t.copies(slot_to_expert[p]) == 1 ? slot_to_expert[p] : -1;
  });
  if (team.rank() == 0) {  // a stable counting sort of a few dozen experts
    int filled = 0;
    for (int k = 0; k < num_classes; ++k) {
      workspace[k] = filled;  // colours are read to the end, so the offsets that replace them wait here
      for (int e = 0; e < E; ++e)
        if (t.copies(e) > 1 && colour[e] == k) t.order[filled++] = e;
    }
    for (int k = 0; k < num_classes; ++k) t.classes[k] = static_cast<int32_t>(workspace[k]);
    for (int k = num_classes; k <= E; ++k) t.classes[k] = filled;
    for (int i = filled; i < E; ++i) t.order[i] = -1;
    t.header[0] = filled;
    t.header[1] = num_classes;
  }
  team.sync();
  team.for_each(t.header[0], [&](int i) {
    for (int j = t.offsets[t.order[i]]; j < t.offsets[t.order[i] + 1]; ++j) t.split[t.slots[j]] = i;
  });
  team.sync();
}

struct TablesProblem {
  int R, E, S;
  const int32_t* slot_to_expert;  // [P]
};

struct TablesPlanner {  // see planner.h
  using Problem = TablesProblem;
  using Result = MutableReplicaTables;
  static constexpr bool kSets = false;

  ISOLOAD_HD static void select(Problem& in, Result& out, int64_t b) {
    const int64_t P = int64_t(in.R) * in.S;
    in.slot_to_expert += b * P;
    out = out.layer(b, in.E, P);
  }
  template <int W>
  ISOLOAD_HD static int64_t bytes(const Problem& in) {
    return replica_tables_workspace(in.R, in.E) * int64_t(sizeof(uint64_t));
  }
  template <int W, class Team>
  ISOLOAD_HD static int solve(Team& team, const Problem& in, void* memory, const Result& out) {
    replica_tables(team, in.slot_to_expert, in.R, in.E, in.S, out, static_cast<uint64_t*>(memory));
    return kPlanned;
  }
  template <class Team>
  ISOLOAD_HD static void refuse(Team&, const Problem&, const Result&) {}
};

}  // namespace isoload
