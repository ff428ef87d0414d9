#include <vector>

#include "cpu/cpu.h"

namespace isoload::cpu {

void replica_tables(const int32_t* slot_to_expert, int R, int E, int S, int32_t* tables) {
  thread_local std::vector<uint64_t> workspace;
  workspace.resize(replica_tables_workspace(R, E));
  SerialTeam team;
  isoload::replica_tables(team, slot_to_expert, R, E, S, MutableReplicaTables::at(tables, E, int64_t(R) * S),
                          workspace.data());
}

}  // namespace isoload::cpu
