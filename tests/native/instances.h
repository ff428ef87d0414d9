// Random and degenerate planning problems for teams.cpp: one seed, one instance.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>
#include <string>
#include <vector>

#include "algorithms/start.h"

// SplitMix64: the same instances on every machine and standard library.
class Rng {
 public:
  explicit Rng(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  int below(int n) { return static_cast<int>(next() % static_cast<uint64_t>(n)); }
  int between(int low, int high) { return low + below(high - low + 1); }
  bool one_in(int n) { return below(n) == 0; }

 private:
  uint64_t state_;
};

struct Instance {
  int R, S, E, ranks_per_node, row;       // row: the source rank whose share is also computed alone
  std::vector<int32_t> slot_to_expert;    // [R * S]
  std::vector<int32_t> loads;             // [R, E]
  std::vector<int32_t> summed;            // [E] over sources; wraps where the planner must refuse the loads
  std::vector<int32_t> fixed, ticks;      // [R] or empty
  std::vector<int32_t> pour;              // [1] or empty
  isoload::Objective objective;           // the solve that is cut short takes summed loads: not local there
  int32_t sweeps, budget, tolerance_ppm;  // budget and tolerance only of the solve that is cut short
  std::string name;                       // what was drawn, for messages

  int P() const { return R * S; }
  bool has_replica(int e) const {
    return std::find(slot_to_expert.begin(), slot_to_expert.end(), e) != slot_to_expert.end();
  }
};

// Every expert once, then again those with the most weight per replica, as EPLB does. Needs E <= P.
inline void place_eplb(Instance& in, Rng& rng) {
  std::vector<int> weight(in.E), copies(in.E, 1);
  for (int& w : weight) w = 1 + rng.below(1 << rng.below(12));
  for (int p = 0; p < in.P(); ++p) {
    int chosen = p;
    if (p >= in.E) {
      chosen = 0;
      for (int e = 1; e < in.E; ++e)
        if (int64_t(weight[e]) * copies[chosen] > int64_t(weight[chosen]) * copies[e]) chosen = e;
      ++copies[chosen];
    }
    in.slot_to_expert[(p % in.R) * in.S + p / in.R] = chosen;
  }
}

// expert_of(r, s) for every slot s of every rank r.
template <class F>
void fill_slots(Instance& in, int num_experts, F&& expert_of) {
  in.E = num_experts;
  for (int r = 0; r < in.R; ++r)
    for (int s = 0; s < in.S; ++s) in.slot_to_expert[r * in.S + s] = expert_of(r, s);
}

inline void draw_placement(Instance& in, Rng& rng, int room) {
  const int R = in.R, S = in.S = rng.between(1, std::max(2, room / R)), clique = rng.between(1, R);
  in.slot_to_expert.assign(R * S, -1);
  const int kind = rng.below(20);
  if (kind == 0) {
    in.name = "no replicas";
    fill_slots(in, R * S, [&](int r, int s) { return r * S + s; });
  } else if (kind <= 3) {
    in.name = "chains";
    fill_slots(in, R, [&](int r, int s) { return (r + s) % R; });
  } else if (kind <= 6) {
    in.name = "cliques";
    fill_slots(in, (R + clique - 1) / clique * S, [&](int r, int s) { return r / clique * S + s; });
  } else if (kind <= 9) {
    in.name = "duplicates";
    fill_slots(in, R, [&](int r, int s) { return (r + s / 2) % R; });
  } else if (kind <= 12) {
    in.name = "random slots";
    const int E = rng.between(1, R * S);
    fill_slots(in, E, [&](int, int) { return rng.below(E); });
  } else {
    in.name = "eplb";
    in.E = rng.between(std::max(1, R * S / 2), R * S);
    place_eplb(in, rng);
  }
  if (!rng.one_in(3)) return;
  in.name += " with holes";
  for (int32_t& e : in.slot_to_expert)
    if (rng.one_in(4)) e = -1;
}

inline void draw_loads(Instance& in, Rng& rng) {
  enum Kind { none, few, skewed, hot, full };  // full: together 2^31 - 1 copies
  static const char* const names[] = {", no loads", ", few", ", skewed", ", one hot expert", ", full"};
  const Kind kind = rng.one_in(12) ? none : static_cast<Kind>(rng.between(few, full));
  in.name += names[kind];
  const int favourite = rng.below(in.E), most = INT_MAX / 4 / (in.R * in.E) + 1;
  in.loads.assign(in.R * in.E, 0);
  int64_t left = INT_MAX;
  for (int e = 0; e < in.E; ++e) {
    if (kind == none || !in.has_replica(e)) continue;
    int top = kind == few ? 3 : 1 << rng.below(kind == skewed ? 16 : 9);
    if (kind == hot) top = e == favourite ? most : top * rng.below(2);
    for (int s = 0; s < in.R; ++s)
      if (!rng.one_in(8)) left -= in.loads[s * in.E + e] = rng.below(std::min(top, most) + 1);
  }
  if (rng.one_in(4)) {
    in.name += ", fixed";
    in.fixed.resize(in.R);
    for (int32_t& f : in.fixed) left -= f = rng.below(1 << rng.below(12));
  }
  if (rng.one_in(4)) {
    in.name += ", pour";
    in.pour.push_back(rng.below(1 << rng.below(20)));
    left -= in.pour[0];
  }
  if (kind == full && in.has_replica(favourite))
    in.loads[rng.below(in.R) * in.E + favourite] += static_cast<int32_t>(left);
  if (!rng.one_in(40)) return;
  in.name += ", a load out of range";  // negative, or too much together, or perhaps of an absent expert
  in.loads[rng.below(in.R) * in.E + rng.below(in.E)] = rng.one_in(2) ? -1 : INT_MAX;
}

// `room` bounds the slots and so the work: one barrier of many threads takes as long as thousands of moves.
inline Instance draw(uint64_t seed, int room) {
  static const int ranks[] = {1, 2, 7, 8, 16, 33, 64, 65, 128, 130};
  Rng rng(seed);
  Instance in;
  in.R = rng.one_in(2) ? rng.between(1, 9) : ranks[rng.below(10)];
  draw_placement(in, rng, room);
  draw_loads(in, rng);
  for (int e = 0; e < in.E; ++e) {
    uint32_t sum = 0;
    for (int s = 0; s < in.R; ++s) sum += static_cast<uint32_t>(in.loads[s * in.E + e]);
    in.summed.push_back(static_cast<int32_t>(sum));
  }
  if (rng.one_in(4)) {
    in.name += ", ticks";
    const bool wild = rng.one_in(3);
    for (int r = 0; r < in.R; ++r)
      in.ticks.push_back(wild ? 1 + rng.below(1 << rng.below(21)) : rng.between(512, 2048));
  }
  do in.ranks_per_node = rng.between(1, in.R);
  while (in.R % in.ranks_per_node);
  in.row = rng.below(in.R);
  in.objective = static_cast<isoload::Objective>(rng.below(2));
  in.sweeps = rng.one_in(2) ? 0 : rng.below(6);
  in.budget = rng.below(4);
  in.tolerance_ppm = rng.one_in(2) ? 0 : rng.below(100000);
  in.name = "R=" + std::to_string(in.R) + " S=" + std::to_string(in.S) + " E=" + std::to_string(in.E) +
            " ranks_per_node=" + std::to_string(in.ranks_per_node) +
            " objective=" + std::to_string(int(in.objective)) + " " + in.name;
  return in;
}
