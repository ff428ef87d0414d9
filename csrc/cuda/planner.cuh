// The CUDA shell of every planner (planner.h): one block of four warps per layer of the batch.
#pragma once

#include "cuda/cuda.h"
#include "cuda/launch.cuh"
#include "planner.h"

namespace isoload::cuda {

// What this block does: the planner's answer for its own layer, or what a refused layer leaves behind.
// Changes the kernel's own arguments: copies of them would take registers.
template <class Planner, int W, class Team>
__device__ __forceinline__ void plan_layer(Team& team, typename Planner::Problem& in,
                                           typename Planner::Result& out, void* global, int32_t* errors,
                                           Fault fault) {
  take_turn();
  Planner::select(in, out, blockIdx.x);
  void* const memory = block_workspace(global, Planner::template bytes<W>(in));
  if (Planner::template solve<W>(team, in, memory, out) == kPlanned) return;
  Planner::refuse(team, in, out);
  if (team.rank() == 0) report(errors, fault);
}

// The kernels of a planner: launch<W>(B, shared_bytes, stream, arguments of the kernel...).
template <class Planner>
struct Kernels;

template <class Planner>
int64_t plan_bytes(const typename Planner::Problem& problem, int64_t B) {
  return with_words<Planner>(problem,
                             [&](auto W) { return global_bytes(B, Planner::template bytes<W>(problem)); });
}

template <class Planner>
const char* plan(const typename Planner::Problem& problem, const typename Planner::Result& result, int64_t B,
                 void* global, void* stream) {
  return with_words<Planner>(problem, [&](auto W) {
    const int64_t bytes = global ? 0 : Planner::template bytes<W>(problem);
    return Kernels<Planner>::template launch<W>(B, bytes, stream, problem, result, global, error_word());
  });
}

}  // namespace isoload::cuda

// For a .cu of its own, so that a profiler shows the op's name: the kernel, and the launcher of csrc/ops.
#define ISOLOAD_LAUNCHER(Planner)                                         \
  template int64_t plan_bytes<Planner>(const Planner::Problem&, int64_t); \
  template const char* plan<Planner>(const Planner::Problem&, const Planner::Result&, int64_t, void*, void*);

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
  ISOLOAD_LAUNCHER(Planner)                                                                                  \
  }
