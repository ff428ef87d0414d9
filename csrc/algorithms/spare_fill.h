// spare_fill: what the planners that fill spare slots by a forecast share (plan_fill, top_up): the
// problem, the copies per expert, who holds what, and the filled slots with their telemetry.
#pragma once

#include <cstdint>

#include "algorithms/quotient.h"
#include "host_device.h"
#include "planner.h"
#include "workspace.h"

namespace isoload {

struct FillProblem {
  int R, E, S, per_node,
      spare;  // ranks, routed experts, slots per rank, ranks per node, spare slots: the last
  const int32_t *loads, *fixed;   // [num_sources, E] copies; [R] copies that ranks carry besides, or null
  int num_sources;                //
  const int32_t* slot_to_expert;  // [P]
  const int32_t* home_slot;       // [E]
  const bool* alive;              // [R] or null
  bool within;                    // experts do not leave the node of their home slot

  ISOLOAD_HD void select(int64_t b) {
    const int64_t P = int64_t(R) * S;
    loads += b * num_sources * E;
    if (fixed) fixed += b * R;
    slot_to_expert += b * P;
    home_slot += b * E;
  }
};

struct FillResult {
  int32_t* slot_to_expert;  // [P]
  int32_t* telemetry;  // [5] imports, most imports and exports of a rank, imports from other nodes, flags

  ISOLOAD_HD void select(const FillProblem& in, int64_t b) {
    slot_to_expert += b * in.R * in.S;
    telemetry += b * 5;
  }
};

struct FillWorkspace : Workspace<FillWorkspace> {
  int64_t *load, *key;             // [R]; [E] the planner's own measures
  int32_t *total, *owner, *first;  // [E] copies; rank of the home slot or -1; the planner's own
  int32_t *room, *exports;         // [R] spare slots left; experts lent
  int32_t* holds;                  // [R, E] whether the rank has a slot of the expert

  template <class Take>
  ISOLOAD_HD void lay_out(int64_t R, int64_t E, Take&& take) {
    take(R, load), take(E, key), take(E, total, owner, first), take(R, room, exports), take(R * E, holds);
  }
};

// What is in the spare slots, counted, behind a barrier: one lane may have filled them. Ends with another: a
// caller's lanes may read the result. exports: [R], for any use before.
template <class Team>
ISOLOAD_HD void count_imports(Team& team, const FillProblem& in, const FillResult& out, const int32_t* owners,
                              int32_t* exports, int32_t flags) {
  team.for_each(in.R, [&](int r) { exports[r] = 0; });
  team.sync();
  int64_t imports = 0, most_imports = 0, across = 0, most_exports = 0;
  team.for_each(in.R, [&](int r) {
    int64_t mine = 0;
    ISOLOAD_ROLLED
    for (int p = (r + 1) * in.S - in.spare; p < (r + 1) * in.S; ++p) {
      const int e = out.slot_to_expert[p], owner = e >= 0 && e < in.E ? owners[e] : -1;
      if (owner < 0) continue;
      ++mine;
      across += owner / in.per_node != r / in.per_node;
      team.add(&exports[owner], 1);
    }
    imports += mine;
    most_imports = mine > most_imports ? mine : most_imports;
  });
  team.sync();
  team.for_each(in.R, [&](int r) { most_exports = exports[r] > most_exports ? exports[r] : most_exports; });
  const int64_t counts[] = {team.sum(imports), team.max(most_imports), team.max(most_exports),
                            team.sum(across), flags};
  if (team.rank() == 0) ISOLOAD_ROLLED
  for (int i = 0; i < 5; ++i) out.telemetry[i] = static_cast<int32_t>(counts[i]);
  team.sync();
}

// What a refused layer leaves behind: the slots as they were.
template <class Team>
ISOLOAD_HD void refuse_fill(Team& team, const FillProblem& in, const FillResult& out) {
  team.for_each(in.R * in.S, [&](int p) { out.slot_to_expert[p] = in.slot_to_expert[p]; });
  team.for_each(5, [&](int i) { out.telemetry[i] = 0; });
}

template <class Team>
class SpareFill {
 public:
  ISOLOAD_HD SpareFill(Team& team, const FillProblem& problem, const FillWorkspace& workspace,
                       const FillResult& out)
      : in(problem), ws(workspace), team_(team), out_(out) {}

  // Adds up the copies and notes who holds what. False: the loads are no loads, or no rank is alive.
  ISOLOAD_HD bool start() {
    team_.for_each(in.R * in.E, [&](int i) { ws.holds[i] = 0; });
    team_.for_each(in.E, [&](int e) { ws.owner[e] = -1; });
    team_.sync();
    int64_t copies = 0, live = 0;
    int32_t sign = 0;
    team_.for_each(in.R, [&](int r) {
      const int first = r * in.S, end = first + in.S;
      ws.room[r] = 0;
      ISOLOAD_ROLLED
      for (int p = first; p < end; ++p) {
        const int e = out_.slot_to_expert[p] = in.slot_to_expert[p];
        ws.room[r] += p >= end - in.spare && e < 0 && alive(r);
        if (e < 0 || e >= in.E) continue;
        holds(r, e) = 1;
        if (in.home_slot[e] == p) ws.owner[e] = r;
      }
      live += alive(r), copies += fixed(r), sign |= fixed(r);
    });
    team_.for_each(in.E, [&](int e) {
      int64_t sum = 0;
      for (int s = 0; s < in.num_sources; ++s) sign |= load(s, e), sum += load(s, e);
      ws.total[e] = static_cast<int32_t>(sum < INT32_MAX ? sum : INT32_MAX);
      copies += sum;
    });
    live = team_.sum(live), copies = team_.sum(copies);
    return !team_.any(sign < 0) && copies <= INT32_MAX && live > 0;
  }

  ISOLOAD_HD bool alive(int r) const { return !in.alive || in.alive[r]; }
  ISOLOAD_HD int32_t fixed(int r) const { return in.fixed ? in.fixed[r] : 0; }
  ISOLOAD_HD int32_t load(int source, int e) const { return in.loads[int64_t(source) * in.E + e]; }
  ISOLOAD_HD int32_t& holds(int r, int e) const { return ws.holds[int64_t(r) * in.E + e]; }

  // f(r, group) for every rank, by a group of lanes.
  template <class F>
  ISOLOAD_HD void for_each_rank(F&& f) const {
    team_.for_each_by(in.R, [](int) { return true; }, [](int) {}, f);
  }

  // The least loaded rank with room that lacks the expert and may borrow it, or -1.
  template <class Group>
  ISOLOAD_HD int taker(const Group& group, int e) const {
    int best;
    const int owner = ws.owner[e], first = in.within ? owner - owner % in.per_node : 0;
    const int end = in.within ? first + in.per_node : in.R;
    auto room_for = [&](int r) {
      return ws.room[r] > 0 && r >= first && r < end && !holds(r, e) ? INT64_MAX - ws.load[r] : 0;
    };
    return group.largest(in.R, room_for, best) > 0 ? best : -1;
  }

  // Puts the expert into the rank's first empty spare slot.
  ISOLOAD_HD void place(int r, int e) const {
    int p = (r + 1) * in.S - in.spare;
    ISOLOAD_ROLLED
    while (out_.slot_to_expert[p] >= 0) ++p;
    out_.slot_to_expert[p] = e;
    holds(r, e) = 1;
    --ws.room[r];
  }

  ISOLOAD_HD void publish() { count_imports(team_, in, out_, ws.owner, ws.exports, 0); }

  const FillProblem& in;
  const FillWorkspace& ws;

 private:
  Team& team_;
  const FillResult& out_;
};

// The planner of a Solver<Team>(team, problem, workspace, out) whose run() says whether there is a plan.
template <template <class Team> class Solver, class P>
struct FillPlanner : PlannerOf<P, FillResult> {  // see planner.h
  ISOLOAD_HD static void select(P& in, FillResult& out, int64_t b) {
    in.select(b);
    out.select(in, b);
  }
  template <int W>
  ISOLOAD_HD static int64_t bytes(const P& in) {
    return FillWorkspace::bytes(in.R, in.E);
  }
  template <int W, class Team>
  ISOLOAD_HD static int solve(Team& team, const P& in, void* memory, const FillResult& out) {
    const FillWorkspace workspace = FillWorkspace::at(memory, in.R, in.E);
    return Solver<Team>(team, in, workspace, out).run() ? kPlanned : 0;
  }
  template <class Team>
  ISOLOAD_HD static void refuse(Team& team, const P& in, const FillResult& out) {
    refuse_fill(team, in, out);
  }

  // Plain: no dead ranks.
  ISOLOAD_HD static bool is_plain(const P& in) { return in.alive == nullptr; }
  template <bool kPlain>
  ISOLOAD_HD static void prepare(P& in) {
    if (kPlain) in.alive = nullptr;
    lies_in_global(in.alive);
  }
  template <class Take>
  ISOLOAD_HD static void fetched(P& in, FillResult& out, Take&& take) {
    const int64_t E = in.E, num_slots = int64_t(in.R) * in.S;
    take(in.loads, in.num_sources * E), take(in.slot_to_expert, num_slots), take(in.home_slot, E);
    take(out.slot_to_expert, num_slots), take(in.fixed, in.R, kOrNone);
  }
};

}  // namespace isoload
