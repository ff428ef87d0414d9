#include <vector>

#include "cpu/cpu.h"

namespace isoload::cpu {

int share(const ShareProblem& problem, int32_t* out) {
  thread_local std::vector<int32_t> workspace;
  workspace.resize(share_workspace(problem));
  SerialTeam team;
  return Share<SerialTeam>(team, problem, workspace.data(), out).run();
}

}  // namespace isoload::cpu
