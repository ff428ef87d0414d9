// RankSet<W>: a set of up to 64*W ranks as W machine words.
#pragma once

#include <cstdint>
#include <type_traits>

#include "host_device.h"

namespace isoload {

constexpr int kMaxRanks = 1024;

template <int W>
struct ISOLOAD_ALIGNED(W > 1 ? 16 : 8) RankSet {
  uint64_t word[W] = {};

  // A constant for one word: a run-time index would keep the set out of a GPU's registers.
  ISOLOAD_HD static constexpr int at(int r) { return W == 1 ? 0 : r >> 6; }

  // Ranks 0 .. n-1.
  ISOLOAD_HD static RankSet first(int n) {
    RankSet set;
    ISOLOAD_UNROLLED(W > 4 ? 1 : 4)
    for (int w = 0; w < W; ++w) {
      const int left = n - 64 * w;
      set.word[w] = left >= 64 ? ~uint64_t(0) : left > 0 ? (uint64_t(1) << left) - 1 : 0;
    }
    return set;
  }

  ISOLOAD_HD void insert(int r) { word[at(r)] |= uint64_t(1) << (r & 63); }
  ISOLOAD_HD void erase(int r) { word[at(r)] &= ~(uint64_t(1) << (r & 63)); }
  // No branch, like unite_if(): a coin flip in the solver's inner loop.
  ISOLOAD_HD void insert_if(bool condition, int r) { word[at(r)] |= uint64_t(condition) << (r & 63); }
  ISOLOAD_HD bool contains(int r) const { return word[at(r)] >> (r & 63) & 1; }
  ISOLOAD_HD bool empty() const {
    uint64_t all = 0;
    ISOLOAD_UNROLLED(W > 4 ? 1 : 4)
    for (int w = 0; w < W; ++w) all |= word[w];
    return all == 0;
  }
  ISOLOAD_HD bool meets(const RankSet& other) const {
    uint64_t all = 0;
    ISOLOAD_UNROLLED(W > 4 ? 1 : 4)
    for (int w = 0; w < W; ++w) all |= word[w] & other.word[w];
    return all != 0;
  }
  // The lowest member of this & other, or -1.
  ISOLOAD_HD int lowest_in(const RankSet& other) const {
    ISOLOAD_ROLLED
    for (int w = 0; w < W; ++w)
      if (uint64_t both = word[w] & other.word[w]) return w * 64 + lowest_one(both);
    return -1;
  }
  ISOLOAD_HD RankSet& operator|=(const RankSet& other) {
    ISOLOAD_UNROLLED(W > 4 ? 1 : 4)
    for (int w = 0; w < W; ++w) word[w] |= other.word[w];
    return *this;
  }
  ISOLOAD_HD void unite_if(bool condition, const RankSet& other) {
    ISOLOAD_UNROLLED(W > 4 ? 1 : 4)
    for (int w = 0; w < W; ++w) word[w] |= other.word[w] & -uint64_t(condition);
  }
  ISOLOAD_HD RankSet& subtract(const RankSet& other) {
    ISOLOAD_UNROLLED(W > 4 ? 1 : 4)
    for (int w = 0; w < W; ++w) word[w] &= ~other.word[w];
    return *this;
  }
  template <class F>
  ISOLOAD_HD void for_each(F&& f) const {
    ISOLOAD_ROLLED
    for (int w = 0; w < W; ++w) {
      ISOLOAD_ROLLED
      for (uint64_t left = word[w]; left; left &= left - 1) f(w * 64 + lowest_one(left));
    }
  }
};

// A set to be read: one word in a register, more where they lie.
template <int W>
using ReadSet = std::conditional_t<W == 1, const RankSet<W>, const RankSet<W>&>;

// Every lane's set of ranks below R becomes the union of all.
template <int W, class Team>
ISOLOAD_HD void unite(Team& team, RankSet<W>& mine, int R = 64 * W) {
  ISOLOAD_ROLLED
  for (int w = 0; w < W; ++w) mine.word[w] = team.any(mine.word[w], W == 1 ? R : 64);
}

// Places for R ranks in a workspace: as many as a set of one word has, so that a kernel has what lies behind
// them at a constant distance.
template <int W>
ISOLOAD_HD constexpr int64_t places(int64_t R) {
  return W == 1 ? 64 : R;
}

// f(W): the number of words that a set of R ranks takes.
template <class F>
auto with_words(int R, F&& f) {
  if (R <= 64) return f(std::integral_constant<int, 1>());
  if (R <= 128) return f(std::integral_constant<int, 2>());
  if (R <= 256) return f(std::integral_constant<int, 4>());
  return f(std::integral_constant<int, kMaxRanks / 64>());
}

}  // namespace isoload
