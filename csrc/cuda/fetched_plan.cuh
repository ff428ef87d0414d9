// Exact planners whose loads, tables and quota lie in shared memory next to the workspace: no pointer of
// theirs leads anywhere else. Eight warps, and one of them for the paths.
#pragma once

#include "algorithms/plan_exact.h"
#include "cuda/fetch.cuh"
#include "cuda/launch.cuh"
#include "cuda/planner.cuh"

namespace isoload::cuda {

using FetchedTeam = BlockTeam<8, true>;

struct FetchedSizes {                      // of a block, in int32
  int64_t workspace, loads, tables, P, R;  // P of the quota, R + 1 of what ranks carry besides

  template <class Planner>
  __host__ __device__ static FetchedSizes of(const typename Planner::Problem& in) {
    const int64_t E = in.E, P = int64_t(in.R) * in.S, bytes = Planner::template bytes<1>(in);
    return {padded(bytes) / int64_t(sizeof(int32_t)), in.num_sources * E, ReplicaTables::size(E, P), P, in.R};
  }
  int64_t bytes() const { return (workspace + loads + tables + P + R + 1) * int64_t(sizeof(int32_t)); }
};

template <class Planner>
bool fits_fetched(const typename Planner::Problem& problem) {
  return problem.R <= 64 && FetchedSizes::of<Planner>(problem).bytes() <= shared_limit();
}

// The usual problem: ranks of equal speed, no other start.
inline bool is_plain(const ExactProblem& problem) {
  return problem.ticks == nullptr && problem.objective == Objective::spread;
}

template <class Planner>
struct FetchedKernels;

// Copies that are not given are none.
template <class Team>
__device__ void fetch_or_clear(const Team& team, const int32_t* from, int n, int32_t* to) {
  if (from)
    fetch(team, from, n, to);
  else
    team.for_each(n, [&](int i) { to[i] = 0; });
}

// What this block does: as plan_layer. kPlain: of a plain problem, whose code has no divisions by ticks and
// no other start.
template <class Planner, bool kPlain>
__device__ __forceinline__ void plan_fetched(FetchedTeam& team, typename Planner::Problem& in,
                                             typename Planner::Result& out, int32_t* errors, Fault fault) {
  take_turn();
  Planner::select(in, out, blockIdx.x);
  if (kPlain) in.ticks = nullptr, in.objective = Objective::spread;
  lies_in_global(in.ticks);
  const FetchedSizes sizes = FetchedSizes::of<Planner>(in);
  int32_t* const loads = reinterpret_cast<int32_t*>(shared_memory) + sizes.workspace;
  int32_t *const tables = loads + sizes.loads, *const quota = tables + sizes.tables, *const to = out.quota;
  int32_t *const fixed = quota + sizes.P, *const pour = fixed + sizes.R;
  fetch(team, in.loads, sizes.loads, loads);
  fetch(team, in.tables.header, sizes.tables, tables);
  fetch_or_clear(team, in.fixed, in.R, fixed);
  fetch_or_clear(team, in.pour, 1, pour);
  in.fixed = fixed, in.pour = pour;
  in.loads = loads, in.tables = ReplicaTables::at(tables, in.E, sizes.P), out.quota = quota;
  wait_for_fetched(team);
  if (Planner::template solve<1>(team, in, shared_memory, out) != kPlanned) {
    Planner::refuse(team, in, out);
    if (team.rank() == 0) report(errors, fault);
  }  // a lane takes to global memory what it has refused, or what all left before the planner's last barrier
  team.for_each(static_cast<int>(sizes.P), [&](int p) { to[p] = quota[p]; });
}

}  // namespace isoload::cuda

// Kernels of a planner whose layers are fetched: FetchedKernels<Planner>::launch<kPlain>(problem, result, B,
// stream).
#define ISOLOAD_FETCHED_KERNELS(name, Planner, fault)                                                       \
  namespace isoload::cuda {                                                                                 \
  namespace {                                                                                               \
  template <bool kPlain>                                                                                    \
  __global__ void __launch_bounds__(FetchedTeam::kLanes, 1) name##_fetched_kernel(Planner::Problem problem, \
                                                                                  Planner::Result result,   \
                                                                                  int32_t* errors) {        \
    __shared__ FetchedTeam::Group group;                                                                    \
    FetchedTeam team(group);                                                                                \
    plan_fetched<Planner, kPlain>(team, problem, result, errors, fault);                                    \
  }                                                                                                         \
  }                                                                                                         \
  template <>                                                                                               \
  struct FetchedKernels<Planner> {                                                                          \
    template <bool kPlain>                                                                                  \
    static const char* launch(const Planner::Problem& problem, const Planner::Result& result, int64_t B,    \
                              void* stream) {                                                               \
      return cuda::launch(name##_fetched_kernel<kPlain>, B, FetchedTeam::kLanes,                            \
                          FetchedSizes::of<Planner>(problem).bytes(), stream, problem, result,              \
                          error_word());                                                                    \
    }                                                                                                       \
  };                                                                                                        \
  }

// All kernels of a planner: fetched where that fits, else as every planner.
#define ISOLOAD_FETCHED_PLANNER(name, Planner, fault)                                                        \
  ISOLOAD_FETCHED_KERNELS(name, Planner, fault)                                                              \
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
    template <int W>                                                                                         \
    static const char* launch(int64_t B, int64_t bytes, void* stream, const Planner::Problem& problem,       \
                              const Planner::Result& result, void* global, int32_t* errors) {                \
      if (W == 1 && global == nullptr && fits_fetched<Planner>(problem)) {                                   \
        using Fetched = FetchedKernels<Planner>;                                                             \
        return is_plain(problem) ? Fetched::launch<true>(problem, result, B, stream)                         \
                                 : Fetched::launch<false>(problem, result, B, stream);                       \
      }                                                                                                      \
      return cuda::launch(name##_kernel<W>, B, PlanTeam::kLanes, bytes, stream, problem, result, global,     \
                          errors);                                                                           \
    }                                                                                                        \
  };                                                                                                         \
  ISOLOAD_LAUNCHER(Planner)                                                                                  \
  }
