#include "cpu/cpu.h"

namespace isoload::cpu {

template <class Real>
bool round_split(const RoundingProblem<Real>& problem, int32_t* quota) {
  SerialTeam team;
  return Rounding<Real, SerialTeam>(team, problem, quota).run();
}

template bool round_split(const RoundingProblem<float>& problem, int32_t* quota);
template bool round_split(const RoundingProblem<double>& problem, int32_t* quota);

}  // namespace isoload::cpu
