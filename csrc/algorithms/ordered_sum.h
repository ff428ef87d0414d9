// OrderedSum: float sums that are the same bits whatever the number of lanes.
//
// Float addition is not associative, so the order is part of the result: term i goes to column i % 16, each
// column adds its terms by ascending i, and the columns are added as a tree.
#pragma once

#include "host_device.h"

namespace isoload {

template <class Real, class Team>
class OrderedSum {
 public:
  static constexpr int kColumns = 16;
  static constexpr int kScratch = 2 * kColumns;

  ISOLOAD_HD OrderedSum(Team& team, Real* scratch) : team_(team), scratch_(scratch) {}

  // The sum of term(0) .. term(n - 1), the same in all lanes; a barrier on both sides.
  template <class F>
  ISOLOAD_HD Real operator()(int n, F&& term) {
    team_.sync();
    Real column[kColumns];
    if (team_.size() == 1 || n <= kFew)
      add_all(n, term, column);
    else
      add_shared(n, term, column);
    for (int half = kColumns / 2; half > 0; half /= 2)
      for (int c = 0; c < half; ++c) column[c] += column[c + half];
    if (n <= kFew) team_.sync();
    return column[0];
  }

 private:
  // So many terms every lane adds up sooner than lanes tell each other; doubles would take too many
  // registers.
  static constexpr int kFew = sizeof(Real) == 4 ? 2 * kColumns : 0;

  template <class F>
  ISOLOAD_HD static void add_all(int n, F&& term, Real* column) {
    for (int c = 0; c < kColumns; ++c) column[c] = 0;
    int first = 0;
    for (; first + kColumns <= n; first += kColumns)
      for (int c = 0; c < kColumns; ++c) column[c] += term(first + c);
    for (int c = 0; c < kColumns; ++c)
      if (first + c < n) column[c] += term(first + c);
  }

  template <class F>
  ISOLOAD_HD void add_shared(int n, F&& term, Real* column) {
    Real* shared = scratch_ + (odd_ ? kColumns : 0);  // a lane that runs ahead writes the other half
    odd_ = !odd_;
    team_.for_each(kColumns, [&](int c) {
      Real sum = 0;
      for (int i = c; i < n; i += kColumns) sum += term(i);
      shared[c] = sum;
    });
    team_.sync();
    for (int c = 0; c < kColumns; ++c) column[c] = shared[c];
  }

  Team& team_;
  Real* const scratch_;
  bool odd_ = false;
};

}  // namespace isoload
