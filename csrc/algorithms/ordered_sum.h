// OrderedSum: float sums that are the same bits whatever the number of lanes.
//
// Float addition is not associative, so the order is part of the result: term i goes to column i % 16, each
// column adds its terms by ascending i, and the columns are added as a tree.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "host_device.h"
#include "packs.h"

namespace isoload {

// The largest of non-negative values, one per lane; NaN counts as the largest. As integers their bits are in
// the same order. A barrier.
template <class Real, class Team>
ISOLOAD_HD Real largest(Team& team, Real value) {
  using Bits = std::conditional_t<sizeof(Real) == 4, int32_t, int64_t>;
  constexpr Bits kNoSign = ~uint64_t(0) >> (65 - 8 * sizeof(Bits));
  Bits bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits &= kNoSign;
  if constexpr (sizeof(Real) == 4)
    bits = team.max32(bits);
  else
    bits = team.max(bits);
  std::memcpy(&value, &bits, sizeof bits);
  return value;
}

// term(0) .. term(n - 1)
template <class F>
struct Terms {
  int n;
  F term;
};
template <class F>
Terms(int, F) -> Terms<F>;

template <class Real, class Team>
class OrderedSum {
 public:
  static constexpr int kColumns = 16;
  static constexpr int kMost = 5;  // sums at once
  static constexpr int kScratch = 2 * kMost * kColumns;

  // scratch lies at a multiple of 16 bytes.
  ISOLOAD_HD OrderedSum(Team& team, Real* scratch) : team_(team), scratch_(scratch) {}

  // One sum, the same in all lanes; a barrier on both sides.
  template <class F>
  ISOLOAD_HD Real operator()(int n, F&& term) {
    if (team_.size() == 1) return add_all(n, term);
    team_.sync();
    start(Terms{n, term});
    team_.sync();
    return take(0);
  }

  // Adds up the columns of several sums; every term is from before the last barrier.
  template <class... F>
  ISOLOAD_HD void start(const Terms<F>&... of) {
    static_assert(sizeof...(F) <= kMost, "more sums than scratch is for");
    odd_ = !odd_;  // a lane that runs ahead writes the other half
    Real* const half = scratch_half();
    int i = 0;
    if (team_.size() == 1) {
      ((half[i++] = add_all(of.n, of.term)), ...);
      return;
    }
    team_.for_each(kColumns * int(sizeof...(F)), [&](int m) {
      Real sum = 0;
      int k = 0;
      ((k++ == m / kColumns ? add_column(of, m % kColumns, sum) : void()), ...);
      half[m] = sum;
    });
  }

  // Sum i of the last start, a barrier after it.
  ISOLOAD_HD Real take(int i) const {
    if (team_.size() == 1) return scratch_half()[i];
    Real column[kColumns];
    load(scratch_half() + i * kColumns, column);
    return tree(column);
  }

  ISOLOAD_HD static Real tree(Real (&column)[kColumns]) {
    fold<8>(column), fold<4>(column), fold<2>(column);
    return column[0] + column[1];
  }

 private:
  ISOLOAD_HD Real* scratch_half() const { return scratch_ + (odd_ ? kMost * kColumns : 0); }

  template <int half>
  ISOLOAD_HD static void fold(Real (&column)[kColumns]) {
    for (int c = 0; c < half; ++c) column[c] += column[c + half];
  }

  template <class F>
  ISOLOAD_HD static Real add_all(int n, F&& term) {
    Real column[kColumns] = {};
    int first = 0;
    for (; first + kColumns <= n; first += kColumns)
      for (int c = 0; c < kColumns; ++c) column[c] += term(first + c);
    for (int c = 0; first + c < n; ++c) column[c] += term(first + c);
    return tree(column);
  }

  template <class F>
  ISOLOAD_HD static void add_column(const Terms<F>& of, int c, Real& sum) {
    ISOLOAD_ROLLED
    for (int i = c; i < of.n; i += kColumns) sum += of.term(i);
  }

  Team& team_;
  Real* const scratch_;
  bool odd_ = false;
};

}  // namespace isoload
