#include <cstring>

#include "cpu/cpu.h"

namespace isoload::cpu {

void borrow(const Borrowing& in, const Rows* spare) {
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

template <class Value>
void borrow_backward(const Borrowing& in, const Rows* totals) {
  using Total = decltype(widen(Value()));
  for (int r = 0; r < in.R; ++r)
    for (int j = 0; j < in.spare_slots; ++j) {
      const Home home = in.home_of(r, j);
      if (home.rank != in.rank) continue;
      for (int w = 0; w < in.W; ++w) {
        const int64_t size = totals[w].size;
        const Value* const gradient = reinterpret_cast<const Value*>(in.peer(r, w)) + j * size;
        Total* const total = static_cast<Total*>(totals[w].data) + home.row * size;
        for (int64_t i = 0; i < size; ++i) total[i] += widen(gradient[i]);
      }
    }
}

template void borrow_backward<double>(const Borrowing&, const Rows*);
template void borrow_backward<float>(const Borrowing&, const Rows*);
template void borrow_backward<BFloat16>(const Borrowing&, const Rows*);
template void borrow_backward<Float16>(const Borrowing&, const Rows*);

}  // namespace isoload::cpu
