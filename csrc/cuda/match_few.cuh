// The matching of route_shared for up to 64 ranks and 4096 tokens: one block, whose lanes keep their tokens
// in registers. Same choices as csrc/cpu/route_shared.h.
//
// Every warp works out for itself which rank chooses next. A round is a barrier, behind which all ranks' lost
// visitors are known, and one more where the rank has visitors to spare, who are counted by level first.
#pragma once

#include "cuda/cuda.h"
#include "cuda/launch.cuh"
#include "rank_set.h"

namespace isoload::cuda {

class FewMatcher {
 public:
  static constexpr int kWarps = 32, kTurns = 4;  // tokens of a lane, 32 apart: those of a warp are a run
  static constexpr int kLanes = kWarps * 32, kMostRanks = 64;
  static constexpr int kMostTokens = kTurns * kLanes;

  struct Shared {
    int32_t budget[kMostRanks];   // copies that a rank takes of the column
    int32_t lost[3][kMostRanks];  // visitors that others chose, by round: read, added to, and set to 0
    // The choosing rank's free visitors, by how many ranks to come they visit: each warp's, then all. The
    // other half is set to 0 for the next.
    int32_t level[2][kMostRanks * (kWarps + 1)];
    int32_t left[kWarps];      // tokens of a warp that nobody chose
    int32_t line[kMostRanks];  // the budgets left over, laid end to end: where each one ends
  };

  static bool fits(const SharedRoute& in) { return in.T <= kMostTokens && in.R <= kMostRanks; }

  __device__ FewMatcher(Shared& shared, const SharedRoute& in)
      : s_(shared), in_(in), turns_((static_cast<int>(in.T) + kLanes - 1) / kLanes) {
    clear(s_.level[0]);
  }

  // visits_of(t): the ranks that token t visits.
  template <class VisitsOf>
  __device__ void read(VisitsOf&& visits_of) {
#pragma unroll 1
    for (int turn = 0; turn < turns_; ++turn) {
      const uint64_t visits = is_token(turn) ? visits_of(token(turn)) : 0;
#pragma unroll
      for (int a = 0; a < kTurns; ++a) visits_[a] = a == turn ? visits : visits_[a];
    }
  }

  // Column j: every rank's part of the cumulative share c is floor((c + j) / num_shared).
  template <class Out>
  __device__ void match(int j, Out* out) {
    if (j > 0) __syncthreads();  // all have dealt the rest of the column before
    start(j);
    auto give = [&](int a, int rank) {
      out[int64_t(token(a)) * in_.width + j] = static_cast<Out>(in_.written(rank, j));
    };
    for (int round = 1; todo_ != 0; round = following(round)) {
      int32_t beyond;
      const int d = fewest_to_spare(beyond);
      todo_ &= ~(uint64_t(1) << d);
      int32_t* const lost = s_.lost[round];
      if (threadIdx.x < kMostRanks) s_.lost[following(round)][threadIdx.x] = 0;
      const unsigned chosen = choose(d, beyond);
#pragma unroll
      for (int a = 0; a < kTurns; ++a) {
        if (!(chosen >> a & 1)) continue;
        give(a, d);
        RankSet<1>{visits_[a] & todo_}.for_each([&](int other) { atomicAdd(&lost[other], 1); });
      }
      free_ &= ~chosen;
      __syncthreads();
#pragma unroll
      for (int h = 0; h < 2; ++h) beyond_[h] -= lost[lane() + 32 * h];
    }
    deal_rest(give);
  }

 private:
  static constexpr unsigned kAll = 0xffffffffu;
  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ static int warp() { return threadIdx.x / 32; }
  __device__ static unsigned lanes_before() { return (1u << lane()) - 1; }

  __device__ int token(int a) const { return (warp() * turns_ + a) * 32 + lane(); }
  __device__ bool is_token(int a) const { return a < turns_ && token(a) < in_.T; }
  __device__ static int following(int round) { return round < 2 ? round + 1 : 0; }

  // Levels are read by four; a token visits K ranks at most, one of them the choosing one.
  __device__ void clear(int32_t* level) const {
    const int levels = (in_.K < kMostRanks ? in_.K : kMostRanks) + 3 & ~3;
#pragma unroll 1
    for (int i = threadIdx.x; i < levels * (kWarps + 1); i += kLanes) level[i] = 0;
  }

  // of [2], what ranks lane and lane + 32 have, becomes what all up to them have.
  __device__ static void add_up(uint32_t (&of)[2]) {
    uint64_t both = uint64_t(of[1]) << 32 | of[0];
    for (int far = 1; far < 32; far *= 2) {
      const uint64_t other = __shfl_up_sync(kAll, both, far);
      if (lane() >= far) both += other;
    }
    of[0] = static_cast<uint32_t>(both);
    of[1] = static_cast<uint32_t>(both >> 32) + __shfl_sync(kAll, of[0], 31);
  }

  __device__ void start(int j) {
    uint32_t row[2], line[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int d = lane() + 32 * h;
      row[h] = line[h] = d < in_.R ? in_.source_quota[d] : 0;
    }
    add_up(line);
    todo_ = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int d = lane() + 32 * h;
      const uint32_t from = (line[h] - row[h] + j) / in_.num_shared, upto = (line[h] + j) / in_.num_shared;
      const uint32_t wanted = upto > from ? upto - from : 0;
      const int32_t budget = static_cast<int32_t>(wanted < uint32_t(kMostTokens) ? wanted : kMostTokens);
      const bool away = budget > 0 && d != in_.home;
      todo_ |= uint64_t(__ballot_sync(kAll, away)) << (32 * h);
      beyond_[h] = away ? -budget : 0;
      if (warp() == 0) s_.budget[d] = budget, s_.lost[0][d] = s_.lost[1][d] = 0;
    }
    __syncthreads();
    free_ = 0;
#pragma unroll
    for (int a = 0; a < kTurns; ++a) {
      const RankSet<1> wanted{visits_[a] & todo_};
      free_ |= unsigned(visits_[a] != 0) << a;
      others_[a] = __popcll(wanted.word[0]);
      wanted.for_each([&](int d) { atomicAdd(&s_.lost[0][d], 1); });
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; ++h) beyond_[h] += s_.lost[0][lane() + 32 * h];
  }

  // The rank of todo with the fewest visitors beyond its budget, the lowest of equal ones.
  __device__ int fewest_to_spare(int32_t& beyond) const {
    int32_t best = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int d = lane() + 32 * h;
      if (!(todo_ >> d & 1)) continue;
      const int32_t key = (kMostTokens - beyond_[h]) * kMostRanks + (kMostRanks - 1 - d);
      best = key > best ? key : best;
    }
    best = __reduce_max_sync(kAll, best);
    beyond = kMostTokens - best / kMostRanks;
    return kMostRanks - 1 - best % kMostRanks;
  }

  // This lane's tokens that d takes: those that visit the fewest ranks of todo, then the lowest.
  __device__ unsigned choose(int d, int32_t beyond) {
    unsigned asking = 0;
#pragma unroll
    for (int a = 0; a < kTurns; ++a) {
      const unsigned visits = visits_[a] >> d & 1;
      others_[a] -= visits;
      asking |= visits << a;
    }
    asking &= free_;
    if (beyond <= 0) return asking;  // uniform
    constexpr int kRow = kWarps + 1;
    int32_t* const level = s_.level[odd_];
    odd_ ^= 1;
#pragma unroll
    for (int a = 0; a < kTurns; ++a) {
      if (!(asking >> a & 1)) continue;
      atomicAdd(&level[others_[a] * kRow + warp()], 1);
      atomicAdd(&level[others_[a] * kRow + kWarps], 1);
    }
    __syncthreads();
    int32_t rest = s_.budget[d];
    const int last = last_level(level + kWarps, rest);
    const int32_t* const split = level + last * kRow;
    int32_t at = __reduce_add_sync(kAll, lane() < warp() ? split[lane()] : 0);
    clear(s_.level[odd_]);
    unsigned chosen = 0;
#pragma unroll
    for (int a = 0; a < kTurns; ++a) chosen |= unsigned(others_[a] < last) << a;
    if (at < rest) {  // uniform in a warp
#pragma unroll
      for (int a = 0; a < kTurns; ++a) {
        const bool there = (asking >> a & 1) && others_[a] == last;
        const unsigned all = __ballot_sync(kAll, there);
        chosen |= unsigned(there && at + __popc(all & lanes_before()) < rest) << a;
        at += __popc(all);
      }
    }
    return chosen & asking;
  }

  // Of in_all, a number per row, the level that does not fit into rest whole; rest: how many of it do.
  __device__ static int last_level(const int32_t* in_all, int32_t& rest) {
    int last = 0;
    for (bool found = false; !found; in_all += 4 * (kWarps + 1)) {
      int32_t here[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) here[i] = in_all[i * (kWarps + 1)];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        found |= here[i] > rest;
        if (!found) rest -= here[i], ++last;
      }
    }
    return last;
  }

  // Tokens that nobody chose, in order: home, then where budgets are left over. Strict: all home.
  template <class Give>
  __device__ void deal_rest(Give&& give) {
    unsigned left[kTurns];
    int32_t sum = 0;
#pragma unroll
    for (int a = 0; a < kTurns; ++a) {
      left[a] = __ballot_sync(kAll, free_ >> a & 1);
      sum += __popc(left[a]);
    }
    if (lane() == 0) s_.left[warp()] = sum;
    if (warp() == 0) {
      uint32_t line[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) line[h] = beyond_[h] < 0 ? -beyond_[h] : 0;
      add_up(line);
#pragma unroll
      for (int h = 0; h < 2; ++h) s_.line[lane() + 32 * h] = static_cast<int32_t>(line[h]);
    }
    __syncthreads();
    int32_t at = __reduce_add_sync(kAll, lane() < warp() ? s_.left[lane()] : 0) - s_.budget[in_.home];
#pragma unroll
    for (int a = 0; a < kTurns; ++a) {
      const int32_t mine = at + __popc(left[a] & lanes_before());
      at += __popc(left[a]);
      if (free_ >> a & 1)
        give(a, in_.strict || mine < 0 ? in_.home : rank_at(mine));
      else if (visits_[a] == 0 && is_token(a))
        give(a, -1);
    }
  }

  // The rank on whose part of the line `at` lies; -1 past its end.
  __device__ int rank_at(int32_t at) const {
    int d = 0;
#pragma unroll 1
    for (int step = kMostRanks / 2; step > 0; step /= 2)
      if (s_.line[d + step - 1] <= at) d += step;
    return s_.line[d] > at ? d : -1;
  }

  Shared& s_;
  const SharedRoute& in_;
  const int turns_;
  uint64_t visits_[kTurns] = {};  // ranks that a token visits
  int others_[kTurns];            // how many of them are in todo
  unsigned free_ = 0;             // tokens with a slot, without a rank yet
  uint64_t todo_ = 0;             // ranks that want copies and did not choose yet
  int32_t beyond_[2];             // free visitors of ranks lane and lane + 32 beyond what they take
  int odd_ = 0;                   // the half of the levels that is 0
};

}  // namespace isoload::cuda
