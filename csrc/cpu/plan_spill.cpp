#include <vector>

#include "cpu/cpu.h"

namespace isoload::cpu {

SpillStatus plan_spill(const SpillProblem& problem, const SpillResult& result) {
  thread_local std::vector<uint64_t> memory;
  const int64_t P = int64_t(problem.R) * problem.S;
  memory.resize(SpillWorkspace::bytes(problem.R, problem.E, P) / sizeof(uint64_t) + 1);
  SerialTeam team;
  const auto workspace = SpillWorkspace::at(memory.data(), problem.R, problem.E, P);
  return Spill<SerialTeam>(team, problem, workspace, result).solve();
}

}  // namespace isoload::cpu
