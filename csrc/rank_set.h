// RankSet<W>: a set of up to 64*W ranks as W machine words.
#pragma once

#include <cstdint>

namespace isoload {

constexpr int kMaxRanks = 1024;

template <int W>
struct RankSet {
  uint64_t word[W] = {};

  void insert(int r) { word[r >> 6] |= uint64_t(1) << (r & 63); }
  void erase(int r) { word[r >> 6] &= ~(uint64_t(1) << (r & 63)); }
  void insert_if(bool condition, int r) { word[r >> 6] |= uint64_t(condition) << (r & 63); }  // no branch
  bool contains(int r) const { return word[r >> 6] >> (r & 63) & 1; }
  bool empty() const {
    uint64_t all = 0;
    for (int w = 0; w < W; ++w) all |= word[w];
    return all == 0;
  }
  bool meets(const RankSet& other) const {
    uint64_t all = 0;
    for (int w = 0; w < W; ++w) all |= word[w] & other.word[w];
    return all != 0;
  }
  // The lowest member of this & other, or -1.
  int lowest_in(const RankSet& other) const {
    for (int w = 0; w < W; ++w)
      if (uint64_t both = word[w] & other.word[w]) return w * 64 + __builtin_ctzll(both);
    return -1;
  }
  RankSet& operator|=(const RankSet& other) {
    for (int w = 0; w < W; ++w) word[w] |= other.word[w];
    return *this;
  }
  void unite_if(bool condition, const RankSet& other) {  // no branch: a coin flip in the solver's inner loop
    for (int w = 0; w < W; ++w) word[w] |= other.word[w] & -uint64_t(condition);
  }
  RankSet& subtract(const RankSet& other) {
    for (int w = 0; w < W; ++w) word[w] &= ~other.word[w];
    return *this;
  }
  bool operator==(const RankSet& other) const {
    bool same = true;
    for (int w = 0; w < W; ++w) same &= word[w] == other.word[w];
    return same;
  }
  template <class F>
  void for_each(F&& f) const {
    for (int w = 0; w < W; ++w)
      for (uint64_t left = word[w]; left; left &= left - 1) f(w * 64 + __builtin_ctzll(left));
  }
};

// The union of every lane's set, in all lanes.
template <int W, class Team>
RankSet<W> unite(Team& team, RankSet<W> mine) {
  for (int w = 0; w < W; ++w) mine.word[w] = team.any(mine.word[w]);
  return mine;
}

}  // namespace isoload
