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
#include "workspace.h"

namespace isoload {

// Views into one layer's buffer of ReplicaTables::size(E, P) int32. python/isoload/ops/tables.py names
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
  template <class Take>
  ISOLOAD_HD void fetched(int64_t E, int64_t P, Take&& take) {  // see planner.h
    take(header, size(E, P));
    *this = at(header, E, P);
  }
  ISOLOAD_HD int num_split() const { return header[0]; }
  ISOLOAD_HD int num_classes() const { return header[1]; }
  ISOLOAD_HD int copies(int e) const { return offsets[e + 1] - offsets[e]; }
};
using ReplicaTables = BasicReplicaTables<const int32_t>;
using MutableReplicaTables = BasicReplicaTables<int32_t>;

// What problems begin with that split a layer's copies.
struct SplitProblem {
  int R, E, S;           // ranks, logical experts, slots per rank
  ReplicaTables tables;  // of this layer
  const int32_t* loads;  // [num_sources, E] copies; of several sources their sums count
  int num_sources;       // R or 1

  ISOLOAD_HD void select(int64_t b) {
    tables = tables.layer(b, E, int64_t(R) * S);
    loads += b * num_sources * E;
  }
};

struct TablesWorkspace : Workspace<TablesWorkspace> {
  int words;                        // of a set of ranks
  int32_t* holders;                 // [E, words] ranks that hold an expert
  int32_t* class_ranks;             // [E, words] ranks that hold an expert of a class
  int32_t* class_size;              // [E]
  int32_t* members;                 // [E] replicated experts, ascending
  int32_t *colour, *place, *index;  // [E] of members: class, and place in it; of experts: index into order
  int32_t* num_classes;             // [1]

  template <class Take>
  ISOLOAD_HD void lay_out(int R, int64_t E, Take&& take) {
    words = (R + 31) / 32;
    take(E * words, holders, class_ranks), take(E, class_size, members, colour, place, index);
    take(1, num_classes);
  }
  ISOLOAD_HD int32_t* holders_of(int e) const { return holders + int64_t(e) * words; }
  // How many ranks below r hold e.
  ISOLOAD_HD int holders_below(int e, int r) const {
    const int32_t* held = holders_of(e);
    int count = 0;
    for (int w = 0; w < r / 32; ++w) count += count_ones(static_cast<uint32_t>(held[w]));
    if (r % 32) count += count_ones(static_cast<uint32_t>(held[r / 32]) << (32 - r % 32));
    return count;
  }
};

// In words of 64 bits.
ISOLOAD_HD inline int64_t replica_tables_workspace(int64_t R, int64_t E) {
  return (TablesWorkspace::bytes(R, E) + 7) / 8;
}

// f(p, r) for every slot p, on rank r. One lane needs no division to find r.
template <class Team, class F>
ISOLOAD_HD void for_slots(const Team& team, int R, int S, F&& f) {
  if (team.size() > 1) return team.for_each(R * S, [&](int p) { f(p, p / S); });
  for (int r = 0; r < R; ++r)
    for (int p = r * S; p < r * S + S; ++p) f(p, r);
}

// Replicas of each expert. A replica's place in the list is the number of lower ranks that hold the expert,
// so lanes need not meet. Leaves solo[p] = 1 for the slots that count, else 0.
template <class Team>
ISOLOAD_HD void list_replicas(Team& team, const int32_t* slot_to_expert, int R, int E, int S,
                              MutableReplicaTables t, const TablesWorkspace& ws) {
  team.for_each(E * ws.words, [&](int i) { ws.holders[i] = 0; });
  team.for_each(E, [&](int e) { t.offsets[e] = 0; });
  team.sync();
  // A slot counts if it is not empty, and the first of its expert on its rank.
  for_slots(team, R, S, [&](int p, int r) {
    const int e = slot_to_expert[p];
    bool first = e >= 0 && e < E;
    for (int q = r * S; first && q < p; ++q) first = slot_to_expert[q] != e;
    t.solo[p] = first;
    t.slots[p] = t.ranks[p] = -1;
    if (!first) return;
    team.add(&ws.holders_of(e)[r / 32], static_cast<int32_t>(uint32_t(1) << (r % 32)));
    team.add(&t.offsets[e], 1);
  });
  team.sync();
  const int listed = team.scan(t.offsets, E);
  if (team.rank() == 0) t.offsets[E] = listed;
  for_slots(team, R, S, [&](int p, int r) {
    if (!t.solo[p]) return;
    const int e = slot_to_expert[p], j = t.offsets[e] + ws.holders_below(e, r);
    t.slots[j] = p, t.ranks[j] = r;
  });
  team.sync();
}

// Greedy colouring in expert order: a class takes an expert if they share no rank, so the lanes of a team may
// balance the experts of one class at the same time. Sequential over experts, parallel over classes.
template <class Group>
ISOLOAD_HD void colour_experts(Group& group, int num_members, const TablesWorkspace& ws) {
  int num_classes = 0, e = num_members > 0 ? ws.members[0] : 0;
  for (int m = 0; m < num_members; ++m) {
    const int32_t* held = ws.holders_of(e);
    e = ws.members[m + 1 < num_members ? m + 1 : m];
    int mine = num_classes;
    group.for_each(num_classes, [&](int k) {
      bool free = k < mine;
      for (int w = 0; free && w < ws.words; ++w) free = (ws.class_ranks[k * ws.words + w] & held[w]) == 0;
      if (free) mine = k;
    });
    const int chosen = -static_cast<int>(group.max(-mine));
    const bool is_new = chosen == num_classes;
    const int32_t size = group.rank() == 0 && !is_new ? ws.class_size[chosen] : 0;
    group.for_each(ws.words, [&](int w) {
      const int32_t taken = is_new ? 0 : ws.class_ranks[chosen * ws.words + w];
      ws.class_ranks[chosen * ws.words + w] = taken | held[w];
    });
    if (group.rank() == 0) ws.colour[m] = chosen, ws.place[m] = size, ws.class_size[chosen] = size + 1;
    num_classes += is_new;
    group.sync();
  }
  if (group.rank() == 0) *ws.num_classes = num_classes;
}

// slot_to_expert [P] with -1 = empty -> tables. workspace: replica_tables_workspace() words, any content.
template <class Team>
ISOLOAD_HD void replica_tables(Team& team, const int32_t* slot_to_expert, int R, int E, int S,
                               MutableReplicaTables t, uint64_t* workspace) {
  const int P = R * S;
  const TablesWorkspace ws = TablesWorkspace::at(workspace, R, E);
  list_replicas(team, slot_to_expert, R, E, S, t, ws);
  team.for_each(E, [&](int e) { ws.index[e] = t.copies(e) > 1; });
  const int num_split = team.scan(ws.index, E);
  team.for_each(E, [&](int e) {
    if (t.copies(e) > 1) ws.members[ws.index[e]] = e;
  });
  team.sync();
  team.alone([&](auto& group) { colour_experts(group, num_split, ws); });
  const int num_classes = *ws.num_classes;
  team.for_each(E, [&](int k) { t.classes[k + 1] = k < num_classes ? ws.class_size[k] : 0; });
  team.sync();
  if (team.rank() == 0) {  // few classes
    t.header[0] = num_split, t.header[1] = num_classes;
    t.classes[0] = 0;
    for (int k = 0; k < num_classes; ++k) t.classes[k + 1] += t.classes[k];
  }
  team.sync();
  team.for_each(E, [&](int i) {
    if (i >= num_classes) t.classes[i + 1] = num_split;
    if (i >= num_split) return void(t.order[i] = -1);
    const int at = t.classes[ws.colour[i]] + ws.place[i];
    t.order[at] = ws.members[i];
    ws.index[ws.members[i]] = at;
  });
  team.sync();
  team.for_each(P, [&](int p) {
    const int e = slot_to_expert[p], copies = t.solo[p] ? t.copies(e) : 0;
    t.solo[p] = copies == 1 ? e : -1;
    t.split[p] = copies > 1 ? ws.index[e] : -1;
  });
  team.sync();
}

struct TablesProblem {
  int R, E, S;
  const int32_t* slot_to_expert;  // [P]
};

struct TablesPlanner : PlannerOf<TablesProblem, MutableReplicaTables> {  // see planner.h
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
