#include <vector>

#include "cpu/cpu.h"

namespace isoload::cpu {

template <int W>
static PlanStatus solve(const ActiveProblem& problem, const ActiveResult& result) {
  thread_local std::vector<uint64_t> memory;
  memory.resize(ActiveWorkspace<W>::bytes(problem.R, problem.E) / sizeof(uint64_t) + 1);
  SerialTeam team;
  const auto workspace = ActiveWorkspace<W>::at(memory.data(), problem.R, problem.E);
  return ActiveSolver<W, SerialTeam>(team, problem, workspace, result).solve();
}

PlanStatus plan_active(const ActiveProblem& problem, const ActiveResult& result) {
  if (problem.R <= 64) return solve<1>(problem, result);
  if (problem.R <= 128) return solve<2>(problem, result);
  if (problem.R <= 256) return solve<4>(problem, result);
  return solve<16>(problem, result);
}

}  // namespace isoload::cpu
