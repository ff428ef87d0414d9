// route_shared: one block matches the tokens of this rank to the ranks they visit, with the same choices as
// csrc/cpu/route_shared.h. The ranks choose one after the other, so more blocks would only wait for each
// other; who visits whom is found ahead by a kernel of many blocks. What is too much for matching.cuh lies in
// global memory.
#include "algorithms/quotient.h"
#include "cuda/cuda.h"
#include "cuda/fetch.cuh"
#include "cuda/launch.cuh"
#include "cuda/matchers.cuh"
#include "cuda/stable_rank.cuh"
#include "rank_set.h"

namespace isoload::cuda {
namespace {

template <int W>
using Team = BlockTeam<W == 1 ? 32 : 16>;  // larger sets take more registers than 32 warps have
constexpr int kFree = -2;                  // a token with a slot, without a rank yet
constexpr int kReaders = 256;

struct Counters {
  int32_t line[kMaxRanks + 1];   // the share, then the budgets left over, laid end to end
  int32_t budget[kMaxRanks];     // copies that a rank still takes
  int32_t visitors[kMaxRanks];   // free tokens that visit a rank
  int32_t level[kMaxRanks + 1];  // free visitors of the choosing rank, by how many ranks to come they visit
};

template <int W>
__device__ RankSet<W> common(RankSet<W> a, const RankSet<W>& b) {
  for (int w = 0; w < W; ++w) a.word[w] &= b.word[w];
  return a;
}

template <int W>
__device__ int size(const RankSet<W>& set) {
  int n = 0;
  for (int w = 0; w < W; ++w) n += __popcll(set.word[w]);
  return n;
}

// Tokens to ranks, one column of copies at a time. Every lane runs it and keeps its own tokens.
template <int W, class Out>
class Matcher {
 public:
  __device__ Matcher(Team<W>& team, Counters& counters, const SharedRoute& in, RankSet<W>* visits, Out* out)
      : team_(team), c_(counters), in_(in), tokens_(static_cast<int>(in.T)), visits_(visits), out_(out) {}

  template <class Id>
  __device__ void read(const Id* slots, int32_t* errors) {
    const int64_t P = int64_t(in_.R) * in_.S;
    team_.for_each(tokens_, [&](int t) {
      RankSet<W> visits;
      for (int k = 0; k < in_.K; ++k) {
        const int64_t slot = slots[int64_t(t) * in_.slots_width + k];
        if (slot >= 0 && slot < P)
          visits.insert(static_cast<int>(slot) / in_.S);
        else if (slot != -1)
          report(errors, kSharedSlot);
      }
      visits_[t] = visits;
    });
  }

  // Column j: every rank's part of the cumulative share c is floor((c + j) / num_shared).
  __device__ void match(int j) {
    column_ = j;
    RankSet<W> wanting;
    lay_out([&](int d) { return in_.source_quota[d]; });
    team_.for_each(in_.R, [&](int d) {
      const uint32_t from = (uint32_t(c_.line[d]) + j) / in_.num_shared,
                     upto = (uint32_t(c_.line[d + 1]) + j) / in_.num_shared;
      c_.budget[d] = static_cast<int32_t>(upto - from);
      c_.visitors[d] = 0;
      wanting.insert_if(d != in_.home && upto > from, d);
    });
    RankSet<W> todo = wanting;
    unite(team_, todo);  // also the barrier
    team_.for_each(tokens_, [&](int t) {
      rank(t) = visits_[t].empty() ? -1 : kFree;
      common(visits_[t], todo).for_each([&](int d) { team_.add(&c_.visitors[d], 1); });
    });
    team_.sync();
    while (!todo.empty()) {
      const int d = fewest_to_spare(todo);
      todo.erase(d);
      choose(d, todo);
    }
    deal_rest();
    if (in_.first_shared >= 0)
      team_.for_each(tokens_, [&](int t) {
        rank(t) = static_cast<Out>(in_.written(static_cast<int>(rank(t)), column_));
      });
  }

 private:
  __device__ Out& rank(int t) { return out_[int64_t(t) * in_.width + column_]; }
  __device__ bool is_free_visitor(int t, int d) {
    const bool visits = visits_[t].contains(d);  // loaded beside the rank, not behind it
    return rank(t) == kFree && visits;
  }

  // line becomes the prefix sums of length(d), each lane scanning what it wrote. Ends with a barrier; the
  // last reader of the line before is behind one already.
  template <class Length>
  __device__ void lay_out(Length&& length) {
    team_.for_each(in_.R + 1, [&](int d) { c_.line[d] = d < in_.R ? length(d) : 0; });
    team_.scan(c_.line, in_.R + 1);
  }

  // The rank of todo with the fewest visitors beyond its budget, the lowest of equal ones.
  __device__ int fewest_to_spare(const RankSet<W>& todo) {
    int64_t best = -1;
    team_.for_each(in_.R, [&](int d) {
      if (!todo.contains(d)) return;
      const int64_t spare = int64_t(c_.visitors[d]) - c_.budget[d];
      const int64_t key = (INT32_MAX - spare) * kMaxRanks + (kMaxRanks - 1 - d);
      best = key > best ? key : best;
    });
    return kMaxRanks - 1 - static_cast<int>(team_.max(best) % kMaxRanks);
  }

  // Gives d up to its budget of free visitors: those that visit the fewest ranks of todo, then the lowest.
  __device__ void choose(int d, const RankSet<W>& todo) {
    const int levels = size(todo) + 1;
    team_.for_each(levels, [&](int l) { c_.level[l] = 0; });
    team_.sync();
    team_.for_each(tokens_, [&](int t) {
      if (is_free_visitor(t, d)) team_.add(&c_.level[size(common(visits_[t], todo))], 1);
    });
    team_.sync();
    int last = 0;  // all of the levels below it, and the first `rest` visitors of it
    int32_t rest = c_.budget[d];
    for (; last < levels && c_.level[last] <= rest; ++last) rest -= c_.level[last];
    int32_t before = 0;
    for (int first = 0; first < tokens_; first += Team<W>::kLanes) {
      const int t = first + team_.rank();
      const bool asks = t < tokens_ && is_free_visitor(t, d);
      const RankSet<W> others = asks ? common(visits_[t], todo) : RankSet<W>();
      const int level = size(others);
      bool chosen = asks && level < last;
      if (last < levels && rest > 0) {  // uniform
        int32_t here;
        const int32_t at = before + team_.before_me(asks && level == last, here);
        chosen |= asks && level == last && at < rest;
        before += here;
      }
      if (!chosen) continue;
      rank(t) = d;
      others.for_each([&](int other) { team_.add(&c_.visitors[other], -1); });
    }
    team_.sync();  // all have read the budget and the levels
    if (team_.rank() == 0) c_.budget[d] = last < levels ? 0 : rest;
    team_.sync();
  }

  // Tokens that nobody chose, in order: home, then where budgets are left over.
  __device__ void deal_rest() {
    const int32_t home = c_.budget[in_.home];
    lay_out([&](int d) { return d == in_.home ? 0 : c_.budget[d]; });
    int32_t before = 0;
    for (int first = 0; first < tokens_; first += Team<W>::kLanes) {
      const int t = first + team_.rank();
      const bool left = t < tokens_ && rank(t) == kFree;
      int32_t here;
      const int32_t at = before + team_.before_me(left, here);
      before += here;
      if (left) rank(t) = at < home ? in_.home : rank_at(at - home);
    }
    team_.sync();
  }

  // The rank on whose part of the line `at` lies; -1 past its end.
  __device__ int rank_at(int32_t at) const {
    int low = 0, high = in_.R;  // the first d with line[d + 1] > at
    while (low < high) {
      const int middle = (low + high) / 2;
      if (c_.line[middle + 1] > at)
        high = middle;
      else
        low = middle + 1;
    }
    return low < in_.R ? low : -1;
  }

  Team<W>& team_;
  Counters& c_;
  const SharedRoute& in_;
  const int tokens_;
  RankSet<W>* const visits_;  // [T]
  Out* const out_;            // [T, width] ranks, where slots are wanted while a column is matched
  int column_ = 0;
};

template <int W, class Id, class Out>
__global__ void __launch_bounds__(Team<W>::kLanes, 1)
    route_shared_kernel(SharedRoute in, const Id* slots, Out* out, void* global, int32_t* errors) {
  take_turn();
  __shared__ typename Team<W>::Group group;
  __shared__ Counters counters;
  Team<W> team(group);
  Matcher<W, Out> matcher(team, counters, in, static_cast<RankSet<W>*>(global), out);
  matcher.read(slots, errors);
  for (int j = 0; j < in.num_shared; ++j) matcher.match(j);
}

// all [size]: the visits of all tokens, a block a part of them.
template <bool kBits, class Id>
__global__ void __launch_bounds__(kReaders)
    route_shared_visits_kernel(SharedRoute in, const Id* slots, int32_t* all, int32_t* errors) {
  take_turn();
  using Visits = typename MatcherOf<kBits>::Visits;
  constexpr int kAhead = 4;
  __shared__ int32_t data[64 * kPartWords];
  const Visits part{data, kPartWords}, to{all, words_of(in.T)};
  const int size = Visits::size(in.R, kPartWords);
  for (int i = threadIdx.x; i < size; i += kReaders) data[i] = 0;
  __syncthreads();
  const int64_t P = int64_t(in.R) * in.S, first = blockIdx.x * cpu::kPartRows;
  const int copies = static_cast<int>(in.T - first < cpu::kPartRows ? in.T - first : cpu::kPartRows) * in.K;
  const Divisor K(in.K > 0 ? in.K : 1), slots_per_rank(in.S);
  const Id* const here = slots + first * in.slots_width;
  int32_t faults = 0;
  for (int i = threadIdx.x; i < copies; i += kAhead * kReaders) {
    int token[kAhead];
    Id slot[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int at = i + a * kReaders;
      token[a] = K.quotient(at);
      slot[a] = at < copies ? here[int64_t(token[a]) * in.slots_width + at - token[a] * in.K] : Id(-1);
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (slot[a] >= 0 && slot[a] < P)
        part.add(slots_per_rank.quotient(static_cast<int>(slot[a])), token[a]);
      else if (slot[a] != -1)
        faults = kSharedSlot;
    }
  }
  report(errors, faults);
  __syncthreads();
  for (int i = threadIdx.x; i < size; i += kReaders) all[to.of_part(blockIdx.x, i)] = data[i];
}

template <bool kBits, class Out>
__global__ void __launch_bounds__(Matching::kLanes, 1)
    route_shared_few_kernel(SharedRoute in, const int32_t* all, Out* out) {
  take_turn();
  using Matcher = MatcherOf<kBits>;
  using Rolled = BlockTeam<Matcher::kWarps, true>;
  __shared__ typename Rolled::Group group;
  const Rolled team(group);
  auto& shared = *reinterpret_cast<typename Matcher::Shared*>(shared_memory);
  const typename Matcher::Visits visits{reinterpret_cast<int32_t*>(&shared + 1), words_of(in.T)};
  fetch(team, all, visits.size(in.R, visits.words), visits.data);
  wait_for_fetched(team);
  Matcher matcher(shared, in, visits);
  for (int j = 0; j < in.num_shared; ++j) matcher.match(j, out);
}

}  // namespace

int64_t route_shared_bytes(const SharedRoute& in) {
  return with_matcher(
      in, [&](auto bits) { return visits_bytes<MatcherOf<bits.value>>(in); },
      [&] { return with_words(in.R, [&](auto W) { return in.T * int64_t(sizeof(RankSet<W>)); }); });
}

template <class Id, class Out>
const char* route_shared(const SharedRoute& in, const Id* slots, Out* out, void* global, void* stream) {
  auto few = [&](auto bits) {
    auto* const all = static_cast<int32_t*>(global);
    if (const char* refused = launch(route_shared_visits_kernel<bits.value, Id>, cpu::num_parts(in.T),
                                     kReaders, 0, stream, in, slots, all, error_word()))
      return refused;
    return launch(route_shared_few_kernel<bits.value, Out>, in.T > 0, Matching::kLanes,
                  matching_bytes<MatcherOf<bits.value>>(in), stream, in, all, out);
  };
  return with_matcher(in, few, [&] {
    return with_words(in.R, [&](auto W) {
      return launch(route_shared_kernel<W, Id, Out>, in.T > 0, Team<W>::kLanes, 0, stream, in, slots, out,
                    global, error_word());
    });
  });
}

template const char* route_shared(const SharedRoute&, const int32_t*, int32_t*, void*, void*);
template const char* route_shared(const SharedRoute&, const int64_t*, int32_t*, void*, void*);
template const char* route_shared(const SharedRoute&, const int64_t*, int64_t*, void*, void*);

}  // namespace isoload::cuda
