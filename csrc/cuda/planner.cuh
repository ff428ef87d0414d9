// The CUDA shells of every planner (planner.h): one block per layer of the batch, of four warps. Where inputs
// are read over and over, a value at a time, and fit into shared memory next to the workspace, a kernel of
// its own brings them there first; no pointer of an exact planner or of plan_fill leads anywhere else then.
#pragma once

#include "cuda/cuda.h"
#include "cuda/fetch.cuh"
#include "cuda/launch.cuh"
#include "planner.h"

namespace isoload::cuda {

// Eight warps, for planners that have work for them, and one of them for an exact plan's paths.
using WideTeam = BlockTeam<8, true>;

template <class Planner, int W, class Team>
__device__ __forceinline__ void solve_layer(Team& team, typename Planner::Problem& in,
                                            typename Planner::Result& out, void* memory, int32_t* errors,
                                            Fault fault) {
  if (Planner::template solve<W>(team, in, memory, out) == kPlanned) return;
  Planner::refuse(team, in, out);
  if (team.rank() == 0) report(errors, fault);
}

// What this block does: the planner's answer for its own layer, or what a refused layer leaves behind.
// Changes the kernel's own arguments: copies of them would take registers.
template <class Planner, int W, class Team>
__device__ __forceinline__ void plan_layer(Team& team, typename Planner::Problem& in,
                                           typename Planner::Result& out, void* global, int32_t* errors,
                                           Fault fault) {
  take_turn();
  Planner::select(in, out, blockIdx.x);
  void* const memory = block_workspace(global, Planner::template bytes<W>(in));
  solve_layer<Planner, W>(team, in, out, memory, errors, fault);
}

// The same with all that is fetched in shared memory. kPlain: of a plain problem.
template <class Planner, bool kPlain, class Team>
__device__ __forceinline__ void plan_fetched(Team& team, typename Planner::Problem& in,
                                             typename Planner::Result& out, int32_t* errors, Fault fault) {
  take_turn();
  Planner::select(in, out, blockIdx.x);
  Planner::template prepare<kPlain>(in);
  const int64_t workspace = padded(Planner::template bytes<1>(in)) / int64_t(sizeof(int32_t));
  int32_t* next = reinterpret_cast<int32_t*>(shared_memory) + workspace;
  int32_t *result = nullptr, *to = nullptr;
  int64_t size = 0;
  Planner::fetched(in, out, [&](auto*& array, int64_t n, auto... or_none) {
    if constexpr (std::is_const_v<std::remove_reference_t<decltype(*array)>>) {
      if (sizeof...(or_none) == 0 || array)
        fetch(team, array, n, next);
      else
        team.for_each(static_cast<int>(n), [&](int i) { next[i] = 0; });
    } else {
      result = next, to = array, size = n;
    }
    array = next, next += n;
  });
  wait_for_fetched(team);
  solve_layer<Planner, 1>(team, in, out, shared_memory, errors, fault);
  // A lane takes to global memory what it has refused, or what all left before the planner's last barrier.
  team.for_each(static_cast<int>(size), [&](int i) { to[i] = result[i]; });
}

// Of a block with all that is fetched.
template <class Planner>
int64_t fetched_bytes(typename Planner::Problem in) {
  typename Planner::Result out{};
  Planner::template prepare<false>(in);
  int64_t bytes = padded(Planner::template bytes<1>(in));
  Planner::fetched(in, out, [&](auto*&, int64_t n, auto...) { bytes += n * int64_t(sizeof(int32_t)); });
  return bytes;
}

template <class Planner>
bool fits_fetched(const typename Planner::Problem& problem) {
  return (!Planner::kSets || problem.R <= 64) && fetched_bytes<Planner>(problem) <= shared_limit();
}

// The kernels of a planner: launch<W>(B, shared_bytes, stream, arguments of the kernel...).
template <class Planner>
struct Kernels;

// Those whose layers are fetched, if there are any: launch<kPlain>(B, shared_bytes, stream, arguments...).
template <class Planner>
struct FetchedKernels {
  static constexpr bool kThere = false;
};

template <class Planner, bool kPlain>
const char* launch_fetched(const typename Planner::Problem& problem, const typename Planner::Result& result,
                           int64_t B, void* stream) {
  return FetchedKernels<Planner>::template launch<kPlain>(B, fetched_bytes<Planner>(problem), stream, problem,
                                                          result, error_word());
}

template <class Planner>
int64_t plan_bytes(const typename Planner::Problem& problem, int64_t B) {
  return with_words<Planner>(problem,
                             [&](auto W) { return global_bytes(B, Planner::template bytes<W>(problem)); });
}

template <class Planner>
const char* plan(const typename Planner::Problem& problem, const typename Planner::Result& result, int64_t B,
                 void* global, void* stream) {
  if constexpr (FetchedKernels<Planner>::kThere)
    if (global == nullptr && fits_fetched<Planner>(problem))
      return Planner::is_plain(problem) ? launch_fetched<Planner, true>(problem, result, B, stream)
                                        : launch_fetched<Planner, false>(problem, result, B, stream);
  return with_words<Planner>(problem, [&](auto W) {
    const int64_t bytes = global ? 0 : Planner::template bytes<W>(problem);
    return Kernels<Planner>::template launch<W>(B, bytes, stream, problem, result, global, error_word());
  });
}

}  // namespace isoload::cuda

// For a .cu of its own, so that a profiler shows the op's name: the kernels, and the launcher of csrc/ops.
#define ISOLOAD_PLANNER(name, Planner, fault)                                                                \
  namespace isoload::cuda {                                                                                  \
  namespace {                                                                                                \
  template <int W>                                                                                           \
  __global__ void __launch_bounds__(PlanTeam::kLanes, 1) name##_kernel(Planner::Problem problem,             \
                                                                       Planner::Result result, void* global, \
                                                                       int32_t* errors) {                    \
    __shared__ PlanTeam::Group group;                                                                        \
    PlanTeam team(group);                                                                                    \
    plan_layer<Planner, W>(team, problem, result, global, errors, fault);                                    \
  }                                                                                                          \
  }                                                                                                          \
  template <>                                                                                                \
  struct Kernels<Planner> {                                                                                  \
    template <int W, class... Arguments>                                                                     \
    static const char* launch(int64_t B, int64_t bytes, void* stream, const Arguments&... arguments) {       \
      return cuda::launch(name##_kernel<W>, B, PlanTeam::kLanes, bytes, stream, arguments...);               \
    }                                                                                                        \
  };                                                                                                         \
  ISOLOAD_LAUNCHER(, Planner)                                                                                \
  }

// Ahead of ISOLOAD_PLANNER, if there is that.
#define ISOLOAD_FETCHED(name, Planner, Team, fault)                                                     \
  namespace isoload::cuda {                                                                             \
  namespace {                                                                                           \
  template <bool kPlain>                                                                                \
  __global__ void __launch_bounds__(Team::kLanes, 1) name##_fetched_kernel(Planner::Problem problem,    \
                                                                           Planner::Result result,      \
                                                                           int32_t* errors) {           \
    __shared__ Team::Group group;                                                                       \
    Team team(group);                                                                                   \
    plan_fetched<Planner, kPlain>(team, problem, result, errors, fault);                                \
  }                                                                                                     \
  }                                                                                                     \
  template <>                                                                                           \
  struct FetchedKernels<Planner> {                                                                      \
    static constexpr bool kThere = true;                                                                \
    template <bool kPlain, class... Arguments>                                                          \
    static const char* launch(int64_t B, int64_t bytes, void* stream, const Arguments&... arguments) {  \
      return cuda::launch(name##_fetched_kernel<kPlain>, B, Team::kLanes, bytes, stream, arguments...); \
    }                                                                                                   \
  };                                                                                                    \
  }
