// Matching (matching.cuh) of up to 32768 tokens, 32 of a lane, of whom each rank's visitors are the bits of a
// word. Same choices as csrc/cpu/route_shared.h, by the same sets of bits. What a warp counts it counts of
// eight sets at a time: the numbers of two fit into a word.
#pragma once

#include "cuda/matching.cuh"

namespace isoload::cuda {

class BitMatcher : public Matching {
 public:
  static constexpr int kMostTokens = kLanes * 32;

  struct Shared : OfRanks {
    // The choosing rank's free visitors, by how many ranks to come they visit, of each warp's tokens.
    int32_t level[kMostRanks][kWarps + 1];
    int32_t left[kWarps];  // tokens of a warp that nobody chose
  };

  // Which tokens visit a rank: words of 32 tokens, of all ranks; those of four ranks lie side by side.
  struct Visits {
    int32_t* data;
    int words;  // of a rank: those of whole parts

    ISOLOAD_HD static int size(int R, int words) { return (R + 7) / 8 * 8 * words; }
    __device__ int at(int rank, int word) const { return (rank / 4 * words + word) * 4 + rank % 4; }
    // Of shared memory; all is 0 at first.
    __device__ void add(int rank, int token) const {
      atomicOr(&data[at(rank, token / 32)], static_cast<int32_t>(1u << token % 32));
    }
    __device__ int of_part(int part, int i) const {
      return at(i / (4 * kPartWords) * 4 + i % 4, part * kPartWords + i / 4 % kPartWords);
    }
  };

  __device__ BitMatcher(Shared& shared, const SharedRoute& in, const Visits& visits)
      : Matching(shared, in), s_(shared), v_(visits), word_(threadIdx.x) {
#pragma unroll 1
    for (int d = 0; d < in.R; d += 4) {
      const Four four = of_four(d);
      present_ |= four.of[0] | four.of[1] | four.of[2] | four.of[3];
    }
  }

  // Column j.
  template <class Out>
  __device__ void match(int j, Out* out) {
    if (j > 0) __syncthreads();  // all have dealt the rest of the column before
    start(j);
    auto give = [&](int token, int rank) {
      out[int64_t(token) * in_.width + j] = static_cast<Out>(in_.written(rank, j));
    };
    for (int round = 1; todo_ != 0; round = following(round)) {
      int32_t beyond;
      const int d = next_to_choose(round, beyond);
      unsigned chosen = has_tokens() ? ask(d) : 0;
      if (beyond > 0) {  // uniform
        if (has_tokens()) count_levels(chosen);
        __syncthreads();
        if (has_tokens()) chosen = choose(chosen, s_.budget[d]);
      }
      if (has_tokens()) {
        free_ &= ~chosen;
        count(chosen, s_.lost[round]);
        for (unsigned left = chosen; left != 0; left &= left - 1) give(word_ * 32 + __ffs(left) - 1, d);
      }
      __syncthreads();
      note(round, -1);
    }
    deal_rest(give);
  }

 private:
  static constexpr int kDigits = 6;  // of a number of ranks besides the choosing one

  struct alignas(16) Four {
    uint32_t of[4];
  };

  __device__ int warps() const { return (v_.words + 31) / 32; }  // with tokens
  __device__ bool has_tokens() const { return warp() < warps(); }

  // The sum over the lanes before of numbers up to 32.
  __device__ static int sum_before(int n) {
    int sum = 0;
#pragma unroll
    for (int p = 0; p < 6; ++p) sum += __popc(__ballot_sync(kAll, n >> p & 1) & lanes_before()) << p;
    return sum;
  }

  // The sizes of eight sets of a warp's tokens: lane i's result is that of set i.
  __device__ static int sizes(const unsigned (&set)[8]) {
    unsigned mine = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned two =
          __reduce_add_sync(kAll, __popc(set[2 * i]) | unsigned(__popc(set[2 * i + 1])) << 16);
      mine = lane() / 2 == i ? two : mine;
    }
    return mine >> (lane() % 2 * 16) & 0xffff;
  }

  // This lane's tokens that visit the four ranks from d on.
  __device__ Four of_four(int d) const {
    if (word_ >= v_.words) return {};
    return *reinterpret_cast<const Four*>(&v_.data[v_.at(d, word_)]);
  }

  __device__ void start(int j) {
    set_budgets(j);
    __syncthreads();
    free_ = present_;
    if (has_tokens()) {
      count(present_, s_.lost[0]);
      count_others();
    }
    __syncthreads();
    note(0, 1);
  }

  // Adds to `to` how many of these tokens visit each rank of todo.
  __device__ void count(unsigned tokens, int32_t* to) const {
#pragma unroll 1
    for (int first = 0; first < in_.R; first += 8) {
      if (!(todo_ >> first & 255)) continue;  // uniform
      const Four low = of_four(first), high = of_four(first + 4);
      unsigned here[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) here[i] = tokens & (i < 4 ? low.of[i % 4] : high.of[i % 4]);
      const int mine = sizes(here), d = first + lane();
      if (lane() < 8 && mine > 0 && (todo_ >> d & 1)) atomicAdd(&to[d], mine);
    }
  }

  // others_: how many ranks of todo a token visits.
  __device__ void count_others() {
#pragma unroll
    for (int p = 0; p < kDigits; ++p) others_[p] = 0;
#pragma unroll 1
    for (int d = 0; d < in_.R; d += 4) {
      if (!(todo_ >> d & 15)) continue;
      const Four four = of_four(d);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        unsigned carry = todo_ >> (d + i) & 1 ? four.of[i] : 0;
#pragma unroll
        for (int p = 0; p < kDigits; ++p) {
          const unsigned digit = others_[p];
          others_[p] = digit ^ carry;
          carry &= digit;
        }
      }
    }
  }

  // d's free visitors; d is no rank to come any more.
  __device__ unsigned ask(int d) {
    const unsigned visits = word_ < v_.words ? v_.data[v_.at(d, word_)] : 0;
    unsigned borrow = visits;
#pragma unroll
    for (int p = 0; p < kDigits; ++p) {
      others_[p] ^= borrow;
      borrow &= others_[p];
    }
    return visits & free_;
  }

  // Those of the asking that visit `others` ranks to come, and those with fewer.
  __device__ unsigned with_others(int others, unsigned asking, unsigned& fewer) const {
    fewer = 0;
#pragma unroll
    for (int p = kDigits - 1; p >= 0; --p) {
      const unsigned digit = others >> p & 1 ? kAll : 0;  // uniform
      fewer |= asking & digit & ~others_[p];
      asking &= ~(digit ^ others_[p]);
    }
    return asking;
  }

  // A token visits K ranks at most, one of them the choosing one.
  __device__ int levels() const {
    const int most = __popcll(todo_) + 1;
    return in_.K < most ? in_.K : most;
  }
  __device__ void count_levels(unsigned asking) {
#pragma unroll 1
    for (int first = 0; first < levels(); first += 8) {
      unsigned at[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        at[i] = asking;
#pragma unroll
        for (int p = 0; p < 3; ++p) at[i] &= i >> p & 1 ? others_[p] : ~others_[p];
#pragma unroll
        for (int p = 3; p < kDigits; ++p) at[i] &= first >> p & 1 ? others_[p] : ~others_[p];
      }
      const int mine = sizes(at);
      if (lane() < 8) s_.level[first + lane()][warp()] = mine;
    }
  }

  // Of the asking, `rest` in all warps: those that visit the fewest ranks of todo, then the lowest.
  __device__ unsigned choose(unsigned asking, int32_t rest) const {
    int last = 0;      // the level that does not fit whole
    int32_t here = 0;  // of it, in the lane's warp
    for (bool found = false; !found;) {
      int32_t mine[4], all[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) mine[i] = lane() < warps() ? s_.level[last + i][lane()] : 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) all[i] = __reduce_add_sync(kAll, mine[i]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (found) continue;
        found = all[i] > rest, here = mine[i];
        if (!found) rest -= all[i], ++last;
      }
    }
    unsigned fewer;
    const unsigned split = with_others(last, asking, fewer);
    rest -= __reduce_add_sync(kAll, lane() < warp() ? here : 0);
    if (rest <= 0) return fewer;  // uniform in a warp
    if (rest >= __shfl_sync(kAll, here, warp())) return fewer | split;
    const int own = __popc(split), fit = rest - sum_before(own);
    const int cut = __ffs(__ballot_sync(kAll, fit < own)) - 1;  // the lane whose tokens do not fit whole
    const unsigned word = __shfl_sync(kAll, split, cut);
    const int n = __shfl_sync(kAll, fit, cut);
    const unsigned first = __ballot_sync(kAll, (word >> lane() & 1) && __popc(word & lanes_before()) < n);
    return fewer | (lane() < cut ? split : lane() == cut ? first : 0);
  }

  // Tokens that nobody chose.
  template <class Give>
  __device__ void deal_rest(Give&& give) {
    const int left = __popc(free_), in_warp = __reduce_add_sync(kAll, left);
    if (lane() == 0) s_.left[warp()] = in_warp;
    lay_out_rest();
    __syncthreads();
    if (!has_tokens()) return;
    const int32_t ahead = __reduce_add_sync(kAll, lane() < warp() ? s_.left[lane()] : 0);
    const int32_t at = ahead + sum_before(left) - s_.budget[in_.home];
#pragma unroll 1
    for (int i = 0; i < 32; ++i) {  // a word at a time, so that lanes write side by side
      const unsigned here = __shfl_sync(kAll, free_, i), present = __shfl_sync(kAll, present_, i);
      const int32_t mine = __shfl_sync(kAll, at, i) + __popc(here & lanes_before());
      const int token = (warp() * 32 + i) * 32 + lane();
      if (here >> lane() & 1)
        give(token, rank_of_left(mine));
      else if (!(present >> lane() & 1) && token < in_.T)
        give(token, -1);
    }
  }

  Shared& s_;
  const Visits v_;
  const int word_;            // this lane's tokens
  unsigned present_ = 0;      // those with a slot
  unsigned free_ = 0;         // without a rank yet
  unsigned others_[kDigits];  // how many ranks of todo they visit: a number of bits, one here, one there
};

}  // namespace isoload::cuda
