// number_rows on one core: slots [T, K] to ranks [T, D], a token's ranks ascending, then R; numbers [T, D],
// each row's number among those to its rank by token, then -1; counts [2, R], the rows and the copies to
// every rank.
#pragma once

#include "cpu/cpu.h"

namespace isoload::cpu {

template <class Slot>
void number_rows(const Slot* slots, const RowSpace& in, int32_t* ranks, int32_t* numbers, int64_t* counts) {
  const int D = in.width();
  for (int r = 0; r < 2 * in.R; ++r) counts[r] = 0;
  for (int64_t t = 0; t < in.T; ++t) {
    int32_t* const row = ranks + t * D;
    int found = 0;
    for (int k = 0; k < in.K; ++k) {
      const int rank = in.rank_of(slots[t * in.K + k]);
      if (rank == in.R) continue;
      ++counts[in.R + rank];
      int at = found;  // insertion by ascending rank
      while (at > 0 && row[at - 1] > rank) --at;
      if (at > 0 && row[at - 1] == rank) continue;
      for (int j = found++; j > at; --j) row[j] = row[j - 1];
      row[at] = rank;
    }
    for (int j = 0; j < D; ++j) {
      if (j >= found) row[j] = in.R;
      numbers[t * D + j] = j < found ? static_cast<int32_t>(counts[row[j]]++) : -1;
    }
  }
}

}  // namespace isoload::cpu
