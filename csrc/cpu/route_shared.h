// route_shared: which rank computes each shared copy of this rank's tokens. Sets of tokens are bit sets.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/cpu.h"

namespace isoload::cpu {

// Matches tokens to the ranks they visit, one column of copies at a time. The rank with fewest visitors to
// spare chooses next, among them first the tokens that other ranks want least, then the lowest.
class Matcher {
 public:
  // Who visits which rank. Returns a slot out of range, or -1.
  template <class Id>
  int64_t read(const SharedRoute& in, const Id* slots) {
    words_ = (in.T + 63) / 64;
    const int64_t P = int64_t(in.R) * in.S;
    row_of_.resize(P);
    for (int64_t p = 0; p < P; ++p) row_of_[p] = p / in.S * words_;
    visits_.assign(in.R * words_, 0);
    present_.assign(words_, 0);
    tokens_ = 0;
    const int64_t* const row_of = row_of_.data();  // the compiler must not reload these for every slot
    uint64_t* const visits = visits_.data();
    for (int64_t t = 0; t < in.T; ++t) {
      const uint64_t bit = uint64_t(1) << (t & 63);
      uint64_t* const word = visits + (t >> 6);
      bool any = false;
      for (const Id *slot = slots + t * in.slots_width, *end = slot + in.K; slot < end; ++slot) {
        if (static_cast<uint64_t>(*slot) < static_cast<uint64_t>(P)) {
          word[row_of[*slot]] |= bit;
          any = true;
        } else if (*slot != -1) {
          return *slot;
        }
      }
      present_[t >> 6] |= any ? bit : 0;
      tokens_ += any;
    }
    return -1;
  }

  int64_t tokens() const { return tokens_; }

  // One copy of every token, that of a column: budget [R] says how many each rank takes.
  template <class Out>
  void match(const SharedRoute& in, std::vector<int32_t>& budget, int column, Out* out) {
    free_ = present_;
    todo_.clear();
    for (int d = 0; d < in.R; ++d)
      if (d != in.home && budget[d] > 0) todo_.push_back(d);
    count_others(in.R);
    while (!todo_.empty()) {
      const auto next = std::min_element(todo_.begin(), todo_.end(),
                                         [&](int a, int b) { return spare(a, budget) < spare(b, budget); });
      const int d = *next;
      todo_.erase(next);
      forget(d);
      choose(d, budget[d], static_cast<Out>(in.written(d, column)), in.width, out + column);
    }
    deal_rest(in, budget, column, out + column);
  }

 private:
  const uint64_t* visits(int d) const { return visits_.data() + d * words_; }
  int64_t spare(int d, const std::vector<int32_t>& budget) const { return visitors_[d] - budget[d]; }

  // others_: for every token a binary number, a plane per digit: how many ranks of todo_ it visits.
  void count_others(int R) {
    int planes = 1;
    while (todo_.size() >> planes) ++planes;
    others_.assign(planes * words_, 0);
    visitors_.assign(R, 0);
    for (const int d : todo_) {
      for (int64_t w = 0; w < words_; ++w) {
        uint64_t carry = visits(d)[w];
        visitors_[d] += __builtin_popcountll(carry);
        for (int64_t at = w; carry; at += words_) {
          const uint64_t digit = others_[at];
          others_[at] = digit ^ carry;
          carry &= digit;
        }
      }
    }
  }

  void forget(int d) {
    for (int64_t w = 0; w < words_; ++w) {
      uint64_t borrow = visits(d)[w];
      for (int64_t at = w; borrow; at += words_) {
        const uint64_t digit = others_[at];
        others_[at] = digit ^ borrow;
        borrow &= ~digit;
      }
    }
  }

  // Gives rank d up to `budget` free visitors, those with fewest others first; lowers it by what it found.
  template <class Out>
  void choose(int d, int32_t& budget, Out to, int stride, Out* out) {
    const int64_t digits = static_cast<int64_t>(others_.size());
    for (uint64_t others = 0; others <= todo_.size() && budget > 0; ++others) {
      for (int64_t w = 0; w < words_ && budget > 0; ++w) {
        uint64_t chosen = free_[w] & visits(d)[w];
        for (int64_t at = w, digit = 0; at < digits; at += words_, ++digit)
          chosen &= others >> digit & 1 ? others_[at] : ~others_[at];
        for (; chosen && budget > 0; chosen &= chosen - 1, --budget) {
          const int64_t t = w * 64 + __builtin_ctzll(chosen);
          out[t * stride] = to;
          free_[w] &= ~(chosen & -chosen);
          for (const int other : todo_) visitors_[other] -= visits(other)[w] >> (t & 63) & 1;
        }
      }
    }
  }

  // Tokens that nobody chose, in order: home, then where budgets are left over.
  template <class Out>
  void deal_rest(const SharedRoute& in, std::vector<int32_t>& budget, int column, Out* out) {
    int d = in.home, next = 0;
    for (int64_t t = 0; t < in.T; ++t) {
      const bool here = present_[t >> 6] >> (t & 63) & 1, left = free_[t >> 6] >> (t & 63) & 1;
      if (!here) out[t * in.width] = -1;
      if (!left) continue;
      while (budget[d] == 0) d = next++;
      --budget[d];
      out[t * in.width] = static_cast<Out>(in.written(d, column));
    }
  }

  int64_t words_ = 0, tokens_ = 0;
  std::vector<int64_t> row_of_;           // [P] where a slot's rank has its row in visits_
  std::vector<uint64_t> visits_;          // [R, words] tokens that visit a rank
  std::vector<uint64_t> present_, free_;  // [words] tokens with a slot; without a rank yet
  std::vector<int> todo_;                 // ranks that want copies and did not choose yet
  std::vector<uint64_t> others_;          // [planes, words]
  std::vector<int64_t> visitors_;         // [R] free visitors of a rank in todo_
};

template <class Id, class Out>
SharedFault route_shared(const SharedRoute& in, const Id* slots, Out* out) {
  thread_local Matcher matcher;
  thread_local std::vector<int32_t> budget;
  const int64_t bad = matcher.read(in, slots);
  if (bad != -1) return {SharedFault::bad_slot, bad};
  int64_t sum = 0;
  for (int d = 0; d < in.R; ++d) sum += in.source_quota[d];
  if (sum != in.num_shared * matcher.tokens())
    return {SharedFault::not_the_share, in.num_shared * matcher.tokens()};
  for (int j = 0; j < in.num_shared; ++j) {
    // Every column takes its part of every rank: the cumulative share c becomes floor((c + j) / num_shared),
    // which over the columns adds up to c again.
    budget.assign(in.R, 0);
    int64_t line = 0, cut = 0;
    for (int d = 0; d < in.R; ++d) {
      line += in.source_quota[d];
      const int64_t upto = (line + j) / in.num_shared;
      budget[d] = static_cast<int32_t>(upto - cut);
      cut = upto;
    }
    matcher.match(in, budget, j, out);
  }
  return {};
}

}  // namespace isoload::cpu
