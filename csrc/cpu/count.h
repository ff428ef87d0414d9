// count on one core.
#pragma once

#include "cpu/cpu.h"

namespace isoload::cpu {

// A copy's number and what every part and all have of each expert. Returns the first id outside [-1, E), or
// -1.
template <class Id>
int64_t number(const Id* ids, int64_t T, int K, int E, const Counts& out) {
  for (int e = 0; e < E; ++e) out.counts[e] = 0;
  int32_t* part = out.parts;
  for (int64_t first = 0; first < T; first += kPartRows, part += E) {
    const int64_t begin = first * K, end = (first + kPartRows < T ? first + kPartRows : T) * K;
    for (int e = 0; e < E; ++e) part[e] = 0;
    for (int64_t i = begin; i < end; ++i) {
      const Id id = ids[i];
      out.numbers[i] = -1;
      if (static_cast<uint64_t>(id) < static_cast<uint64_t>(E))
        out.numbers[i] = part[id]++;
      else if (id != -1)
        return id;
    }
    for (int e = 0; e < E; ++e) out.counts[e] += part[e];
  }
  return -1;
}

// Counts ids [T, K] of E experts. With shared ones, whose ids follow, it counts columns [T, K + num_shared]:
// the ids, then the shared experts' where a row has a choice, -1 where it has none. Returns the first id
// outside [-1, E), or -1.
template <class Id>
int64_t count(const Id* ids, int64_t T, int K, int E, int num_shared, Id* columns, const Counts& out) {
  if (num_shared == 0) return number(ids, T, K, E, out);
  Id* to = columns;
  for (int64_t t = 0; t < T; ++t, ids += K) {
    bool any = false;
    for (int k = 0; k < K; ++k) {
      if (ids[k] >= E) return ids[k];
      any |= ids[k] >= 0;
      *to++ = ids[k];
    }
    for (int j = 0; j < num_shared; ++j) *to++ = any ? static_cast<Id>(E + j) : Id(-1);
  }
  return number(columns, T, K + num_shared, E + num_shared, out);
}

}  // namespace isoload::cpu
