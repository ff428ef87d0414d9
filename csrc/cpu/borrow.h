// borrow, borrow_backward on one core.
#pragma once

#include <cstring>

#include "cpu/cpu.h"

namespace isoload::cpu {

// Copies the homes' rows to this rank's spare pools [W], sizes in bytes.
inline void borrow(const Borrowing& in, const Rows* spare) {
  for (int j = 0; j < in.spare_slots; ++j) {
    const Home home = in.home_of(in.rank, j);
    if (home.rank < 0) continue;
    for (int w = 0; w < in.W; ++w) {
      const int64_t size = spare[w].size;
      if (size == 0) continue;
      const auto* const from = reinterpret_cast<const char*>(in.peer(home.rank, w));
      std::memcpy(static_cast<char*>(spare[w].data) + j * size, from + home.row * size, size);
    }
  }
}

// Adds row `row`'s gradients in the pools of (r, j) and all later slots to total [size], rounding once.
template <class Value, class Total>
void add_row(const Borrowing& in, int row, int from, int w, int64_t size, Total* total) {
  constexpr int64_t kChunk = 512;
  decltype(widen(Value())) sums[kChunk];
  for (int64_t begin = 0; begin < size; begin += kChunk) {
    const int64_t n = size - begin < kChunk ? size - begin : kChunk;
    for (int64_t i = 0; i < n; ++i) sums[i] = widen(total[begin + i]);
    for (int slot = from; slot < in.R * in.spare_slots; ++slot) {
      const int r = slot / in.spare_slots, j = slot % in.spare_slots;
      const Home home = in.home_of(r, j);
      if (home.rank != in.rank || home.row != row) continue;
      const Value* const gradient = reinterpret_cast<const Value*>(in.peer(r, w)) + j * size + begin;
      for (int64_t i = 0; i < n; ++i) sums[i] += widen(gradient[i]);
    }
    for (int64_t i = 0; i < n; ++i) narrow(sums[i], total[begin + i]);
  }
}

// Adds the rows of all ranks' gradient pools to this rank's totals [W], sizes in values; by rank, then slot.
template <class Value, class Total>
void borrow_backward(const Borrowing& in, const Rows* totals, int64_t num_rows) {
  for (int64_t row = 0; row < num_rows; ++row) {
    int first = 0;
    for (; first < in.R * in.spare_slots; ++first) {
      const Home home = in.home_of(first / in.spare_slots, first % in.spare_slots);
      if (home.rank == in.rank && home.row == row) break;
    }
    if (first == in.R * in.spare_slots) continue;
    for (int w = 0; w < in.W; ++w)
      add_row<Value>(in, static_cast<int>(row), first, w, totals[w].size,
                     static_cast<Total*>(totals[w].data) + row * totals[w].size);
  }
}

}  // namespace isoload::cpu
