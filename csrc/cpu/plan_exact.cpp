#include <vector>

#include "cpu/cpu.h"

namespace isoload::cpu {

template <int W>
static PlanStatus solve(const ExactProblem& problem, const ExactResult& result) {
  thread_local std::vector<uint64_t> memory;
  memory.resize(ExactWorkspace<W>::bytes(problem.R, problem.E) / sizeof(uint64_t) + 1);
  SerialTeam team;
  const auto workspace = ExactWorkspace<W>::at(memory.data(), problem.R, problem.E);
  return ExactSolver<W, SerialTeam>(team, problem, workspace, result.quota).solve(result);
}

PlanStatus plan_exact(const ExactProblem& problem, const ExactResult& result) {
  if (problem.R <= 64) return solve<1>(problem, result);
  if (problem.R <= 128) return solve<2>(problem, result);
  if (problem.R <= 256) return solve<4>(problem, result);
  return solve<16>(problem, result);
}

}  // namespace isoload::cpu
