#include <vector>

#include "cpu/cpu.h"

namespace isoload::cpu {

int share(const ShareProblem& problem, ShareOf of, int rank, int32_t* out) {
  thread_local std::vector<int32_t> workspace, left;
  workspace.resize(share_workspace(problem));
  if (of != ShareOf::one_row) left.resize(int64_t(problem.R) * problem.E);
  SerialTeam team;
  Share<SerialTeam> solver(team, problem, workspace.data());
  const int bad = solver.check();
  if (bad >= 0) return bad;
  if (of == ShareOf::one_row) solver.one_row(rank, out);
  if (of == ShareOf::all_rows) solver.all_rows(out, left.data());
  if (of == ShareOf::all_ranks) solver.all_ranks(out, left.data());
  return -1;
}

}  // namespace isoload::cpu
