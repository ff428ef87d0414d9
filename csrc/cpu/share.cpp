#include <algorithm>
#include <vector>

#include "cpu/cpu.h"

namespace isoload::cpu {

namespace {

// An expert with a negative load or quota, or whose quotas do not sum to its load; -1 if there is none.
int unlike(const ShareProblem& problem) {
  const ReplicaTables& t = problem.tables;
  const int64_t R = problem.R, E = problem.E, P = R * problem.S;
  // One look over everything, which costs next to nothing, tells whether to search.
  uint32_t difference = 0;
  int32_t sign = 0;
  for (int64_t i = 0; i < R * E; ++i) sign |= problem.loads[i], difference += uint32_t(problem.loads[i]);
  for (int64_t p = 0; p < P; ++p) sign |= problem.quota[p], difference -= uint32_t(problem.quota[p]);
  for (int e = 0; (sign < 0 || difference != 0) && e < E; ++e) {
    int64_t left = 0;
    bool negative = false;
    auto add = [&](int32_t n, int64_t factor) { negative |= n < 0, left += factor * n; };
    for (int64_t s = 0; s < R; ++s) add(problem.loads[s * E + e], 1);
    for (int j = t.offsets[e]; j < t.offsets[e + 1]; ++j) add(problem.quota[t.slots[j]], -1);
    if (negative || left != 0) return e;
  }
  return -1;
}

}  // namespace

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
  if (const int e = unlike(problem); e >= 0) return e;
  for (int e = 0; e < E; ++e)
    if (t.copies(e) == 1 && !fits(e, problem.loads + e, E)) return e;
  for (int i = 0; i < splits; ++i)
    if (!fits(t.order[i], columns.data() + i, splits)) return t.order[i];
  return -1;
}

}  // namespace isoload::cpu
