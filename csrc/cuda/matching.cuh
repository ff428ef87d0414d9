// The matching of route_shared in one block, for up to 64 ranks: what its two forms share. match_few.cuh
// keeps a token's ranks in a register, match_bits.cuh a rank's tokens as bits of words.
//
// Every warp works out for itself which rank chooses next. A round is a barrier, behind which all ranks' lost
// visitors are known, and one more where the rank has visitors to spare, who are counted by level first.
//
// Which ranks a token visits is found for a part of the tokens by any block, and read by the one that
// matches. A matcher's Visits, of tokens of `words` words of 32: size words in all, 0 at first; add(rank,
// token) in shared memory; of_part(part, i): where the i-th word of a part alone is among those of all.
#pragma once

#include "algorithms/quotient.h"
#include "cuda/cuda.h"
#include "cuda/launch.cuh"

namespace isoload::cuda {

constexpr int kPartWords = cpu::kPartRows / 32;

// Of whole parts.
ISOLOAD_HD inline int words_of(int64_t T) {
  return static_cast<int>((T + cpu::kPartRows - 1) / cpu::kPartRows) * kPartWords;
}

template <class Matcher>
int64_t visits_bytes(const SharedRoute& in) {
  return Matcher::Visits::size(in.R, words_of(in.T)) * int64_t(sizeof(int32_t));
}

// Of shared memory.
template <class Matcher>
int64_t matching_bytes(const SharedRoute& in) {
  return sizeof(typename Matcher::Shared) + visits_bytes<Matcher>(in);
}

template <class Matcher>
bool fits(const SharedRoute& in) {
  static_assert(sizeof(typename Matcher::Shared) % 16 == 0, "visits behind it are read by four words");
  return in.T <= Matcher::kMostTokens && in.R <= Matcher::kMostRanks &&
         matching_bytes<Matcher>(in) <= shared_limit();
}

class Matching {
 public:
  static constexpr int kWarps = 32, kLanes = kWarps * 32, kMostRanks = 64;

 protected:
  static constexpr unsigned kAll = 0xffffffffu;
  static constexpr int kMost = 1 << 15;  // tokens of any matcher

  struct OfRanks {
    int32_t budget[kMostRanks];   // copies that a rank takes of the column
    int32_t lost[3][kMostRanks];  // visitors that others chose, by round: read, added to, and set to 0
    int32_t line[kMostRanks];     // the budgets left over, laid end to end: where each one ends
  };

  __device__ Matching(OfRanks& ranks, const SharedRoute& in) : in_(in), ranks_(ranks) {}

  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ static int warp() { return threadIdx.x / 32; }
  __device__ static unsigned lanes_before() { return (1u << lane()) - 1; }
  __device__ static int following(int round) { return round < 2 ? round + 1 : 0; }

  // Column j: todo_, and the budgets behind the next barrier. Every rank's part of the cumulative share c is
  // floor((c + j) / num_shared).
  __device__ void set_budgets(int j) {
    uint32_t row[2], line[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int d = lane() + 32 * h;
      row[h] = line[h] = d < in_.R ? in_.source_quota[d] : 0;
    }
    add_up(line);
    todo_ = 0;
    const Divisor num_shared(in_.num_shared);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int d = lane() + 32 * h;
      const int wanted = num_shared.quotient(line[h] + j) - num_shared.quotient(line[h] - row[h] + j);
      const int32_t budget = wanted < 0 ? 0 : wanted < kMost ? wanted : kMost;
      const bool away = budget > 0 && d != in_.home;
      todo_ |= uint64_t(__ballot_sync(kAll, away)) << (32 * h);
      beyond_[h] = away ? -budget : 0;
      if (warp() == 0) ranks_.budget[d] = budget, ranks_.lost[0][d] = ranks_.lost[1][d] = 0;
    }
  }

  // The rank that chooses next leaves todo: that with the fewest visitors beyond its budget, the lowest of
  // equal ones.
  __device__ int next_to_choose(int round, int32_t& beyond) {
    int32_t best = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int d = lane() + 32 * h;
      if (warp() == 0) ranks_.lost[following(round)][d] = 0;
      if (!(todo_ >> d & 1)) continue;
      const int32_t key = (kMost - beyond_[h]) * kMostRanks + (kMostRanks - 1 - d);
      best = key > best ? key : best;
    }
    best = __reduce_max_sync(kAll, best);
    beyond = kMost - best / kMostRanks;
    const int d = kMostRanks - 1 - best % kMostRanks;
    todo_ &= ~(uint64_t(1) << d);
    return d;
  }

  // Behind a barrier: sign * what was counted in `round` comes to beyond_.
  __device__ void note(int round, int sign) {
#pragma unroll
    for (int h = 0; h < 2; ++h) beyond_[h] += sign * ranks_.lost[round][lane() + 32 * h];
  }

  // For rank_at, behind the next barrier.
  __device__ void lay_out_rest() {
    if (warp() != 0) return;
    uint32_t line[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) line[h] = beyond_[h] < 0 ? -beyond_[h] : 0;
    add_up(line);
#pragma unroll
    for (int h = 0; h < 2; ++h) ranks_.line[lane() + 32 * h] = static_cast<int32_t>(line[h]);
  }

  // Of the tokens that nobody chose, in order, the one at `at` behind those that home takes: home, then where
  // budgets are left over; -1 past their end.
  __device__ int rank_of_left(int32_t at) const {
    if (at < 0) return in_.home;
    int d = 0;
#pragma unroll 1
    for (int step = kMostRanks / 2; step > 0; step /= 2)
      if (ranks_.line[d + step - 1] <= at) d += step;
    return ranks_.line[d] > at ? d : -1;
  }

  const SharedRoute& in_;
  OfRanks& ranks_;
  uint64_t todo_ = 0;  // ranks that want copies and did not choose yet
  int32_t beyond_[2];  // free visitors of ranks lane and lane + 32 beyond what they take

 private:
  // of [2], what ranks lane and lane + 32 have, becomes what all up to them have.
  __device__ static void add_up(uint32_t (&of)[2]) {
    uint64_t both = uint64_t(of[1]) << 32 | of[0];
#pragma unroll 1
    for (int far = 1; far < 32; far *= 2) {
      const uint64_t other = __shfl_up_sync(kAll, both, far);
      if (lane() >= far) both += other;
    }
    of[0] = static_cast<uint32_t>(both);
    of[1] = static_cast<uint32_t>(both >> 32) + __shfl_sync(kAll, of[0], 31);
  }
};

}  // namespace isoload::cuda
