// balance_own: one block counts, plans and looks up a few copies. More are numbered part by part, then
// planned by one block that adds up the parts, then looked up: three kernels, and nothing that has to be 0
// before.
#include "algorithms/plan_own.h"
#include "cuda/cuda.h"
#include "cuda/fetch.cuh"
#include "cuda/stable_rank.cuh"

namespace isoload::cuda {
namespace {

constexpr int kWarps = 16, kAhead = 4;  // kAhead: turns of a warp whose ids are on their way at once
constexpr int64_t kMostAtOnce = 8192;   // copies of one block
static_assert(kMostAtOnce <= UINT16_MAX);
using OwnTeam = BlockTeam<kWarps, true>;

// Shared memory, in int32. What is fetched comes first, aligned.
struct Places {
  int32_t *tables, *offset, *ticks, *counts, *send, *work;  // of the plan
  uint16_t *before,
      *numbers;  // [kWarps, E] copies of an expert before a warp's, [n] before a copy in its warp

  __host__ __device__ static int64_t plan_words(const OwnProblem& in) {
    const int64_t P = int64_t(in.R) * in.S;
    return ReplicaTables::size(in.E, P) + 2 * int64_t(in.R) + in.E + P +
           OwnSplit<SerialTeam>::bytes(in.R, in.E, P) / int64_t(sizeof(int32_t));
  }
  static int64_t bytes(const OwnProblem& in, int64_t n) {
    return plan_words(in) * int64_t(sizeof(int32_t)) +
           (kWarps * int64_t(in.E) + n) * int64_t(sizeof(uint16_t));
  }
  __device__ static Places of(const OwnProblem& in) {
    Places at;
    const int P = in.R * in.S;
    at.tables = reinterpret_cast<int32_t*>(shared_memory);
    at.offset = at.tables + ReplicaTables::size(in.E, P);
    at.ticks = at.offset + in.R;
    at.counts = at.ticks + in.R;
    at.send = at.counts + in.E;
    at.work = at.send + P;
    at.before = reinterpret_cast<uint16_t*>(at.tables + plan_words(in));
    at.numbers = at.before + kWarps * in.E;
    return at;
  }
};

// Asks for what the plan reads; wait_for_fetched comes next.
__device__ void fetch_plan(const OwnTeam& team, OwnProblem& in, const Places& at) {
  const int P = in.R * in.S;
  fetch(team, in.tables.header, ReplicaTables::size(in.E, P), at.tables);
  fetch(team, in.offset, in.R, at.offset);
  if (in.ticks) fetch(team, in.ticks, in.R, at.ticks);
  in.tables = ReplicaTables::at(at.tables, in.E, P);
  in.offset = at.offset, in.loads = at.counts;
  if (in.ticks) in.ticks = at.ticks;
}

// send [P] of the counts, each of which its lane of for_each has written; whether there is one. A barrier.
__device__ bool plan_counts(OwnTeam& team, const OwnProblem& in, const Places& at, int32_t* errors) {
  const bool planned = OwnSplit<OwnTeam>(team, in, at.work, at.send).solve();
  if (!planned && team.rank() == 0) report(errors, kBalanceOwn);
  return planned;
}

template <class Id>
struct AtOnce {
  OwnProblem plan;
  const Id* ids;  // [n]
  Id* slots;      // [n]
  int n;
  int32_t *counts, *errors;
};

// The copies of this warp: a run of their own in order, so that it can number them by itself.
struct Run {
  int begin, end, lane;

  __device__ static Run of(int n) {
    const int length = (n + kWarps * 32 - 1) / (kWarps * 32) * 32, begin = threadIdx.x / 32 * length;
    return {begin, begin + length < n ? begin + length : n, static_cast<int>(threadIdx.x % 32)};
  }
  // use(i, id) of every copy, 32 at a time; i is behind the end where there is none.
  template <class Id, class Use>
  __device__ void for_turns(const Id* ids, Use&& use) const {
    for (int first = begin; first < end; first += 32 * kAhead) {
      Id id[kAhead];
      fetch_ahead<32>(ids + first + lane, end - first - lane, id);
#pragma unroll
      for (int a = 0; a < kAhead; ++a)
        if (first + 32 * a < end) use(first + 32 * a + lane, id[a]);
    }
  }
};

// numbers of this warp's copies; counter [E]: how often it has an expert.
template <class Id>
__device__ int32_t number_run(const Run& run, const Id* ids, int E, uint16_t* counter, uint16_t* numbers) {
  for (int e = run.lane; e < E; e += 32) counter[e] = 0;
  int32_t faults = 0;
  run.for_turns(ids, [&](int i, Id id) {
    const int e = expert_of(id, E);
    const unsigned peers = __match_any_sync(0xffffffffu, e), before_me = peers & ((1u << run.lane) - 1);
    __syncwarp();  // the counters are written
    const int held = e >= 0 ? counter[e] : 0;
    __syncwarp();  // and read
    if (e >= 0 && before_me == 0) counter[e] = static_cast<uint16_t>(held + __popc(peers));
    if (i >= run.end) return;
    numbers[i] = static_cast<uint16_t>(held + __popc(before_me));
    faults |= e < 0 && id != -1 ? kBalanceId : 0;
  });
  return faults;
}

// counters [kWarps, E], how often each warp has an expert, become how often it came before; counts [E] in
// all.
__device__ void add_up_runs(const OwnTeam& team, int E, const Places& at, int32_t* counts) {
  team.for_each(E, [&](int e) {
    int32_t here[kWarps], sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) here[w] = at.before[w * E + e];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      at.before[w * E + e] = static_cast<uint16_t>(sum);
      sum += here[w];
    }
    at.counts[e] = counts[e] = sum;
  });
}

// The slot of e's copy number `place`.
__device__ int slot_of(const ReplicaTables& t, const int32_t* send, int e, int32_t place) {
  for (int j = t.offsets[e]; j < t.offsets[e + 1]; ++j) {
    const int slot = t.slots[j];
    const int32_t here = send[slot];
    if (place < here) return slot;
    place -= here;
  }
  return -1;
}

template <class Id>
__global__ void __launch_bounds__(OwnTeam::kLanes, 1) balance_own_kernel(AtOnce<Id> in) {
  take_turn();
  __shared__ OwnTeam::Group group;
  OwnTeam team(group);
  const Places at = Places::of(in.plan);
  const Run run = Run::of(in.n);
  uint16_t* const before = at.before + threadIdx.x / 32 * in.plan.E;
  fetch_plan(team, in.plan, at);
  report(in.errors, number_run(run, in.ids, in.plan.E, before, at.numbers));
  wait_for_fetched(team);
  add_up_runs(team, in.plan.E, at, in.counts);
  const bool planned = plan_counts(team, in.plan, at, in.errors);
  run.for_turns(in.ids, [&](int i, Id id) {
    const int e = planned && i < run.end ? expert_of(id, in.plan.E) : -1;
    const int slot = e < 0 ? -1 : slot_of(in.plan.tables, at.send, e, before[e] + at.numbers[i]);
    if (i < run.end) in.slots[i] = static_cast<Id>(slot);
  });
}

// Of more copies: counts [E] are the sums of parts [rows, E]; send [P], 0 where there is no plan.
__global__ void __launch_bounds__(OwnTeam::kLanes, 1)
    balance_own_plan_kernel(OwnProblem in, const int32_t* parts, int rows, int32_t* counts, int32_t* send,
                            int32_t* errors) {
  take_turn();
  __shared__ OwnTeam::Group group;
  OwnTeam team(group);
  const Places at = Places::of(in);
  fetch_plan(team, in, at);
  add_up_rows(parts, in.E, rows, in.E, [&](int e, int32_t sum) { at.counts[e] = counts[e] = sum; });
  wait_for_fetched(team);
  const bool planned = plan_counts(team, in, at, errors);
  team.for_each(in.R * in.S, [&](int p) { send[p] = planned ? at.send[p] : 0; });
}

bool is_at_once(int64_t n, const OwnProblem& in) {
  return n <= kMostAtOnce && Places::bytes(in, n) <= shared_limit();
}

}  // namespace

// numbers [n], parts [C, E], send [P].
int64_t balance_own_bytes(int64_t T, int K, const OwnProblem& in) {
  if (is_at_once(T * K, in)) return 0;
  return (T * K + cpu::num_parts(T) * in.E + int64_t(in.R) * in.S) * int64_t(sizeof(int32_t));
}

template <class Id>
const char* balance_own(const Id* ids, int64_t T, int K, const OwnProblem& in, int32_t* counts, Id* slots,
                        void* global, void* stream) {
  const int64_t n = T * K, C = cpu::num_parts(T);
  const int P = in.R * in.S;
  if (is_at_once(n, in)) {
    const AtOnce<Id> all{in, ids, slots, static_cast<int>(n), counts, error_word()};
    return launch(balance_own_kernel<Id>, 1, OwnTeam::kLanes, Places::bytes(in, n), stream, all);
  }
  auto* const numbers = static_cast<int32_t*>(global);
  int32_t *const parts = numbers + n, *const send = parts + C * in.E;
  const int64_t bytes = Places::bytes(in, 0);
  if (bytes > shared_limit()) return "more experts or slots than a block can plan";
  const char* error =
      count(ids, T, K, in.E, 0, static_cast<Id*>(nullptr), cpu::Counts{nullptr, numbers, parts}, stream);
  if (!error)
    error = launch(balance_own_plan_kernel, 1, OwnTeam::kLanes, bytes, stream, in, parts, static_cast<int>(C),
                   counts, send, error_word());
  const Route route_in{T, K, in.E, P, in.tables, {numbers, parts, in.E}, send, {}};
  return error ? error : route(route_in, ids, slots, nullptr, stream);
}

template const char* balance_own(const int32_t*, int64_t, int, const OwnProblem&, int32_t*, int32_t*, void*,
                                 void*);
template const char* balance_own(const int64_t*, int64_t, int, const OwnProblem&, int32_t*, int64_t*, void*,
                                 void*);

}  // namespace isoload::cuda
