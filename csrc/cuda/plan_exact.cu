// plan_exact: one block per layer of the batch. Where up to 64 ranks' tables and quota fit into shared memory
// next to the workspace, they lie there, and no other pointer is in that kernel: eight warps, and one for the
// paths. Else as every planner.
#include "algorithms/plan_exact.h"
#include "cuda/fetch.cuh"
#include "cuda/planner.cuh"

namespace isoload::cuda {
namespace {

using ExactTeam = BlockTeam<8, true>;
using WideTeam = BlockTeam<kPlanWarps, true>;

struct ExactMemory {  // of a block, in shared memory; in bytes and ints
  int64_t workspace, tables, P;

  __host__ __device__ static ExactMemory of(const ExactProblem& in) {
    const int64_t P = int64_t(in.R) * in.S;
    return {padded(ExactPlanner::bytes<1>(in)), ReplicaTables::size(in.E, P), P};
  }
  int64_t bytes() const { return workspace + (tables + P) * int64_t(sizeof(int32_t)); }
};

template <int W>
__global__ void __launch_bounds__(WideTeam::kLanes, 1)
    plan_exact_kernel(ExactProblem problem, ExactResult result, void* global, int32_t* errors) {
  __shared__ WideTeam::Group group;
  WideTeam team(group);
  plan_layer<ExactPlanner, W>(team, problem, result, global, errors, kPlanExact);
}

// kPlain: the usual problem, whose code has no divisions by ticks and no other start.
template <bool kPlain>
__global__ void __launch_bounds__(ExactTeam::kLanes, 1)
    plan_exact_fetched_kernel(ExactProblem problem, ExactResult result, int32_t* errors) {
  __shared__ ExactTeam::Group group;
  ExactTeam team(group);
  ExactPlanner::select(problem, result, blockIdx.x);
  if (kPlain) problem.ticks = nullptr, problem.objective = Objective::spread;
  const ExactMemory memory = ExactMemory::of(problem);
  int32_t* const tables = reinterpret_cast<int32_t*>(shared_memory) + memory.workspace / sizeof(int32_t);
  int32_t *const quota = tables + memory.tables, *const out = result.quota;
  fetch(team, problem.tables.header, memory.tables, tables);
  problem.tables = ReplicaTables::at(tables, problem.E, memory.P);
  result.quota = quota;
  wait_for_fetched(team);
  if (ExactPlanner::solve<1>(team, problem, shared_memory, result) != kPlanned) {
    team.sync();
    ExactPlanner::refuse(team, problem, result);
    if (team.rank() == 0) report(errors, kPlanExact);
  }
  team.sync();
  team.for_each(static_cast<int>(memory.P), [&](int p) { out[p] = quota[p]; });
}

}  // namespace

template <>
struct Kernels<ExactPlanner> {
  template <int W>
  static const char* launch(int64_t B, int64_t bytes, void* stream, const ExactProblem& problem,
                            const ExactResult& result, void* global, int32_t* errors) {
    const int64_t fetched = ExactMemory::of(problem).bytes();
    if (W == 1 && global == nullptr && fetched <= shared_limit()) {
      const bool plain = problem.ticks == nullptr && problem.objective == Objective::spread;
      return cuda::launch(plain ? plan_exact_fetched_kernel<true> : plan_exact_fetched_kernel<false>, B,
                          ExactTeam::kLanes, fetched, stream, problem, result, errors);
    }
    return cuda::launch(plan_exact_kernel<W>, B, WideTeam::kLanes, bytes, stream, problem, result, global,
                        errors);
  }
};
ISOLOAD_LAUNCHER(ExactPlanner)

}  // namespace isoload::cuda
