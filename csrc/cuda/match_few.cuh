// Matching (matching.cuh) of up to 1024 tokens, one of a lane, its ranks in a register. Same choices as
// csrc/cpu/route_shared.h.
#pragma once

#include "cuda/matching.cuh"
#include "rank_set.h"

namespace isoload::cuda {

class FewMatcher : public Matching {
 public:
  static constexpr int kMostTokens = kLanes;

  struct Shared : OfRanks {
    // The choosing rank's free visitors, by how many ranks to come they visit: each warp's, then all. The
    // other half is set to 0 for the next.
    int32_t level[2][kMostRanks * (kWarps + 1)];
    int32_t left[kWarps];  // tokens of a warp that nobody chose
  };

  // Which ranks a token visits: a bit each, 32 a word.
  struct Visits {
    int32_t* data;
    int words;  // of 32 tokens, had a rank a bit of each

    ISOLOAD_HD static int size(int, int words) { return 64 * words; }
    __device__ void add(int rank, int token) const {
      atomicOr(&data[2 * token + rank / 32], static_cast<int32_t>(1u << rank % 32));
    }
    __device__ static int of_part(int part, int i) { return 64 * kPartWords * part + i; }
  };

  __device__ FewMatcher(Shared& shared, const SharedRoute& in, const Visits& visits)
      : Matching(shared, in), s_(shared) {
    clear(s_.level[0]);
    if (threadIdx.x < in.T) visits_ = reinterpret_cast<const uint64_t*>(visits.data)[threadIdx.x];
  }

  // Column j.
  template <class Out>
  __device__ void match(int j, Out* out) {
    if (j > 0) __syncthreads();  // all have dealt the rest of the column before
    start(j);
    auto give = [&](int rank) {
      out[int64_t(threadIdx.x) * in_.width + j] = static_cast<Out>(in_.written(rank, j));
    };
    for (int round = 1; todo_ != 0; round = following(round)) {
      int32_t beyond;
      const int d = next_to_choose(round, beyond);
      if (is_chosen(d, beyond)) {
        free_ = false;
        give(d);
        RankSet<1>{visits_ & todo_}.for_each([&](int other) { atomicAdd(&s_.lost[round][other], 1); });
      }
      __syncthreads();
      note(round, -1);
    }
    deal_rest(give);
  }

 private:
  // Levels are read by four; a token visits K ranks at most, one of them the choosing one.
  __device__ void clear(int32_t* level) const {
    const int levels = (in_.K < kMostRanks ? in_.K : kMostRanks) + 3 & ~3;
#pragma unroll 1
    for (int i = threadIdx.x; i < levels * (kWarps + 1); i += kLanes) level[i] = 0;
  }

  __device__ void start(int j) {
    set_budgets(j);
    __syncthreads();
    free_ = visits_ != 0;
    const RankSet<1> wanted{visits_ & todo_};
    others_ = __popcll(wanted.word[0]);
    wanted.for_each([&](int d) { atomicAdd(&s_.lost[0][d], 1); });
    __syncthreads();
    note(0, 1);
  }

  // Whether d takes this lane's token: those that visit the fewest ranks of todo, then the lowest.
  __device__ bool is_chosen(int d, int32_t beyond) {
    const bool visits = visits_ >> d & 1, asking = visits && free_;
    others_ -= visits;
    if (beyond <= 0) return asking;  // uniform
    constexpr int kRow = kWarps + 1;
    int32_t* const level = s_.level[odd_];
    odd_ ^= 1;
    if (asking) {
      atomicAdd(&level[others_ * kRow + warp()], 1);
      atomicAdd(&level[others_ * kRow + kWarps], 1);
    }
    __syncthreads();
    int32_t rest = s_.budget[d];
    const int last = last_level(level + kWarps, rest);
    const int32_t* const split = level + last * kRow;
    const int32_t before = __reduce_add_sync(kAll, lane() < warp() ? split[lane()] : 0);
    clear(s_.level[odd_]);
    const bool splits = asking && others_ == last;
    const int32_t at = before + __popc(__ballot_sync(kAll, splits) & lanes_before());
    return splits ? at < rest : asking && others_ < last;
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

  // Tokens that nobody chose.
  template <class Give>
  __device__ void deal_rest(Give&& give) {
    const unsigned left = __ballot_sync(kAll, free_);
    if (lane() == 0) s_.left[warp()] = __popc(left);
    lay_out_rest();
    __syncthreads();
    const int32_t ahead = __reduce_add_sync(kAll, lane() < warp() ? s_.left[lane()] : 0);
    if (free_)
      give(rank_of_left(ahead + __popc(left & lanes_before()) - s_.budget[in_.home]));
    else if (visits_ == 0 && threadIdx.x < in_.T)
      give(-1);
  }

  Shared& s_;
  uint64_t visits_ = 0;  // ranks that this lane's token visits
  int others_ = 0;       // how many of them are in todo
  bool free_ = false;    // whether it has a slot, and no rank yet
  int odd_ = 0;          // the half of the levels that is 0
};

}  // namespace isoload::cuda
