#include <vector>

#include "cpu/cpu.h"

namespace isoload::cpu {

template <int W>
static WaterfillStatus solve(const WaterfillProblem& problem, const WaterfillResult& result) {
  thread_local std::vector<uint64_t> memory;
  memory.resize(WaterfillWorkspace<W>::bytes(problem.R) / sizeof(uint64_t) + 1);
  SerialTeam team;
  const auto workspace = WaterfillWorkspace<W>::at(memory.data(), problem.R);
  return Waterfill<W, SerialTeam>(team, problem, workspace, result).solve();
}

WaterfillStatus plan_waterfill(const WaterfillProblem& problem, const WaterfillResult& result) {
  if (problem.R <= 64) return solve<1>(problem, result);
  if (problem.R <= 128) return solve<2>(problem, result);
  if (problem.R <= 256) return solve<4>(problem, result);
  return solve<16>(problem, result);
}

}  // namespace isoload::cpu
