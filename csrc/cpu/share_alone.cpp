#include "cpu/cpu.h"

namespace isoload::cpu {

int share_alone(const ShareAloneProblem& problem, int32_t* out) {
  SerialTeam team;
  return isoload::share_alone(team, problem, out);
}

}  // namespace isoload::cpu
