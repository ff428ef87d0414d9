// OrderedSum: float sums that are the same bits whatever the number of lanes.
//
// Float addition is not associative, so the order is part of the result: term i goes to column i % 16, each
// column adds its terms by ascending i, and the columns are added as a tree.
#pragma once

namespace isoload {

template <class Real, class Team>
class OrderedSum {
 public:
  static constexpr int kColumns = 16;
  static constexpr int kScratch = 2 * kColumns;

  OrderedSum(Team& team, Real* scratch) : team_(team), scratch_(scratch) {}

  // The sum of term(0) .. term(n - 1), the same in all lanes; a barrier on both sides.
  template <class F>
  Real operator()(int n, F&& term) {
    Real* column = scratch_ + (odd_ ? kColumns : 0);  // a lane that runs ahead writes the other half
    odd_ = !odd_;
    team_.sync();
    team_.for_each(kColumns, [&](int c) {
      Real sum = 0;
      for (int i = c; i < n; i += kColumns) sum += term(i);
      column[c] = sum;
    });
    team_.sync();
    Real tree[kColumns];
    for (int c = 0; c < kColumns; ++c) tree[c] = column[c];
    for (int half = kColumns / 2; half > 0; half /= 2)
      for (int c = 0; c < half; ++c) tree[c] += tree[c + half];
    return tree[0];
  }

 private:
  Team& team_;
  Real* const scratch_;
  bool odd_ = false;
};

}  // namespace isoload
