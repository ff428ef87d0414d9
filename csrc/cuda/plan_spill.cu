// plan_spill: one block per layer of the batch. Where its placement fits into shared memory next to the
// workspace, it is brought there, and no other pointer is in that kernel. Else as every planner.
#include "algorithms/plan_spill.h"
#include "cuda/cuda.h"
#include "cuda/fetch.cuh"
#include "cuda/launch.cuh"

namespace isoload::cuda {
namespace {

// This block's layer of the batch.
__device__ void select(SpillProblem& in, SpillResult& out) {
  const int64_t b = blockIdx.x, E = in.E, R = in.R, P = R * in.S;
  in.loads += b * in.num_sources * E;
  if (in.fixed) in.fixed += b * R;
  if (in.start) in.start += b * P;
  in.slot_to_expert += b * P;
  in.home_slot += b * E;
  out = {out.slot_to_expert + b * P, out.quota + b * P, out.level + b, out.telemetry + b * 5};
}

__device__ __forceinline__ void solve(PlanTeam& team, const SpillProblem& in, const SpillResult& out,
                                      const SpillWorkspace& workspace, int32_t* errors) {
  Spill<PlanTeam> solver(team, in, workspace, out);
  if (solver.solve() == SpillStatus::ok) return;
  team.for_each(in.R * in.S, [&](int p) {
    out.slot_to_expert[p] = in.slot_to_expert[p];
    out.quota[p] = 0;
  });
  team.for_each(5, [&](int i) { out.telemetry[i] = 0; });
  if (team.rank() > 0) return;
  *out.level = -1;
  report(errors, kPlanSpill);
}

__global__ void __launch_bounds__(PlanTeam::kLanes, 1)
    plan_spill_kernel(SpillProblem problem, SpillResult result, void* global, int32_t* errors) {
  take_turn();
  __shared__ PlanTeam::Group group;
  PlanTeam team(group);
  select(problem, result);
  const int64_t P = int64_t(problem.R) * problem.S;
  void* const memory = block_workspace(global, SpillWorkspace::bytes(problem.R, problem.E, P));
  solve(team, problem, result, SpillWorkspace::at(memory, problem.R, problem.E, P), errors);
}

// Bytes of the workspace and of the placement behind it.
__host__ __device__ int64_t fetched_bytes(int R, int E, int64_t P) {
  return padded(SpillWorkspace::bytes(R, E, P)) + (P + E) * int64_t(sizeof(int32_t));
}

// kPlain: the usual problem, whose code has no second start, no dead ranks and no nodes that lend within
// themselves.
template <bool kPlain>
__global__ void __launch_bounds__(PlanTeam::kLanes, 1)
    plan_spill_fetched_kernel(SpillProblem problem, SpillResult result, int32_t* errors) {
  take_turn();
  __shared__ PlanTeam::Group group;
  PlanTeam team(group);
  select(problem, result);
  if (kPlain) problem.start = nullptr, problem.alive = nullptr, problem.within = false;
  lies_in_global(problem.loads), lies_in_global(problem.fixed), lies_in_global(problem.alive);
  const int64_t P = int64_t(problem.R) * problem.S;
  const int64_t workspace = padded(SpillWorkspace::bytes(problem.R, problem.E, P));
  int32_t* const slots = reinterpret_cast<int32_t*>(shared_memory) + workspace / sizeof(int32_t);
  int32_t* const homes = slots + P;
  fetch(team, problem.slot_to_expert, P, slots);
  fetch(team, problem.home_slot, problem.E, homes);
  problem.slot_to_expert = slots, problem.home_slot = homes;
  wait_for_fetched(team);
  solve(team, problem, result, SpillWorkspace::at(shared_memory, problem.R, problem.E, P), errors);
}

}  // namespace

int64_t plan_spill_bytes(int64_t B, int R, int E, int S) {
  return global_bytes(B, SpillWorkspace::bytes(R, E, int64_t(R) * S));
}

const char* plan_spill(const SpillProblem& problem, const SpillResult& result, int64_t B, void* global,
                       void* stream) {
  const int64_t P = int64_t(problem.R) * problem.S, fetched = fetched_bytes(problem.R, problem.E, P);
  if (global == nullptr && fetched <= shared_limit()) {
    const bool plain = problem.start == nullptr && problem.alive == nullptr && !problem.within;
    return launch(plain ? plan_spill_fetched_kernel<true> : plan_spill_fetched_kernel<false>, B,
                  PlanTeam::kLanes, fetched, stream, problem, result, error_word());
  }
  const int64_t bytes = global ? 0 : SpillWorkspace::bytes(problem.R, problem.E, P);
  return launch(plan_spill_kernel, B, PlanTeam::kLanes, bytes, stream, problem, result, global, error_word());
}

}  // namespace isoload::cuda
