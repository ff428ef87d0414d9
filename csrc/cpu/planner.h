// The CPU's shell of every planner (planner.h): one lane solves one layer.
#pragma once

#include <cstdint>
#include <vector>

#include "planner.h"
#include "team.h"

namespace isoload::cpu {

// Solves layer b. kPlanned, or what the planner refused.
template <class Planner>
int plan(const typename Planner::Problem& problem, const typename Planner::Result& result, int64_t b) {
  return with_words<Planner>(problem, [&](auto W) {
    thread_local std::vector<uint64_t> memory;
    typename Planner::Problem in = problem;
    typename Planner::Result out = result;
    Planner::select(in, out, b);
    memory.resize(Planner::template bytes<W>(in) / sizeof(uint64_t) + 1);
    SerialTeam team;
    return Planner::template solve<W>(team, in, memory.data(), out);
  });
}

}  // namespace isoload::cpu
