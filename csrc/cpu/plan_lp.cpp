#include <vector>

#include "cpu/cpu.h"

namespace isoload::cpu {

template <class Real>
bool plan_lp(const LpProblem<Real>& problem, const LpResult<Real>& result) {
  thread_local std::vector<double> memory;
  const int64_t R = problem.R, P = R * problem.S;
  memory.resize(LpWorkspace<Real>::size(R, problem.E, P) / sizeof(double) + 1);
  SerialTeam team;
  const LpWorkspace<Real> workspace(memory.data(), R, problem.E, P);
  return LpSolver<Real, SerialTeam>(team, problem, workspace).solve(result);
}

template bool plan_lp(const LpProblem<float>& problem, const LpResult<float>& result);
template bool plan_lp(const LpProblem<double>& problem, const LpResult<double>& result);

}  // namespace isoload::cpu
