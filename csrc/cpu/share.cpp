#include <algorithm>
#include <vector>

#include "cpu/cpu.h"

namespace isoload::cpu {

int share(const ShareProblem& problem, int32_t* out) {
  const ReplicaTables& t = problem.tables;
  const int R = problem.R, E = problem.E, splits = t.num_split();
  thread_local std::vector<int32_t> memory, columns;
  memory.resize(4 * R);
  columns.resize(int64_t(R) * splits);
  // The split experts' columns, side by side: E columns apart they would miss the cache at every source.
  for (int s = 0; s < R; ++s)
    for (int i = 0; i < splits; ++i) columns[s * splits + i] = problem.loads[int64_t(s) * E + t.order[i]];
  std::fill(out, out + int64_t(problem.last_row - problem.first_row) * R * problem.S, 0);
  SerialTeam team;
  const auto workspace = ShareWorkspace::at(memory.data(), R);
  auto fits = [&](int e, const int32_t* loads, int stride) {
    return ExpertShare<SerialTeam>(team, problem, e, loads, stride, out, workspace).run();
  };
  for (int e = 0; e < E; ++e)
    if (t.copies(e) == 1 && !fits(e, problem.loads + e, E)) return e;
  for (int i = 0; i < splits; ++i)
    if (!fits(t.order[i], columns.data() + i, splits)) return t.order[i];
  return -1;
}

}  // namespace isoload::cpu
