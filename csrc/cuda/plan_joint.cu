// plan_joint: one block per layer of the batch. Where all fits into shared memory, loads and tables are
// fetched there, and results leave it at the end: no pointer leads anywhere else meanwhile.
#include "algorithms/plan_joint.h"
#include "cuda/fetched_plan.cuh"

namespace isoload::cuda {
namespace {

struct JointSizes {  // of a block, in int32
  int64_t workspace, tables, P, R;

  __host__ __device__ static JointSizes of(const JointProblem& in) {
    const int64_t R = in.R, P = R * in.S;
    return {padded(JointMemory<1>::bytes(in)) / int64_t(sizeof(int32_t)), ReplicaTables::size(in.E, P), P, R};
  }
  int64_t bytes() const { return (workspace + tables + 2 * P + R * R) * int64_t(sizeof(int32_t)); }
};

template <int W>
__global__ void __launch_bounds__(PlanTeam::kLanes, 1)
    plan_joint_kernel(JointProblem problem, JointResult result, void* global, int32_t* errors) {
  __shared__ PlanTeam::Group group;
  PlanTeam team(group);
  plan_layer<JointPlanner, W>(team, problem, result, global, errors, kPlanExact);
}

// kPlain: the usual problem, whose code has no divisions by ticks and no other start.
template <bool kPlain>
__global__ void __launch_bounds__(FetchedTeam::kLanes, 1)
    plan_joint_fetched_kernel(JointProblem in, JointResult result, int32_t* errors) {
  take_turn();
  __shared__ FetchedTeam::Group group;
  FetchedTeam team(group);
  JointPlanner::select(in, result, blockIdx.x);
  if (kPlain) in.ticks = nullptr, in.objective = Objective::spread;
  lies_in_global(in.ticks);
  const JointSizes sizes = JointSizes::of(in);
  const JointMemory<1> m = JointMemory<1>::at(shared_memory, in);
  int32_t* const tables = reinterpret_cast<int32_t*>(shared_memory) + sizes.workspace;
  const int64_t width = in.E + in.num_shared;
  for (int s = 0; s < in.R; ++s) fetch(team, in.gathered + s * width, in.E, m.loads + int64_t(s) * in.E);
  team.for_each(in.R, [&](int s) {
    __pipeline_memcpy_async(m.tokens + s, in.gathered + s * width + in.E, sizeof(int32_t));
  });
  fetch(team, in.tables.header, sizes.tables, tables);
  in.loads = m.loads, in.tables = ReplicaTables::at(tables, in.E, sizes.P);
  JointResult out = result;
  out.quota = tables + sizes.tables, out.row = out.quota + sizes.P, out.share = out.row + sizes.P;
  wait_for_fetched(team);
  if (JointPlanner::solve<1>(team, in, shared_memory, out) != kPlanned) {
    JointPlanner::refuse(team, in, out);
    if (team.rank() == 0) report(errors, kPlanExact);
  }  // as in fetched_plan.cuh: what a lane takes it has refused itself, or all left before the last barrier
  team.for_each(static_cast<int>(sizes.P), [&](int p) {
    result.quota[p] = out.quota[p];
    result.row[p] = out.row[p];
  });
  team.for_each(in.R * in.R, [&](int i) { result.share[i] = out.share[i]; });
}

}  // namespace

template <>
struct Kernels<JointPlanner> {
  template <int W>
  static const char* launch(int64_t B, int64_t bytes, void* stream, const JointProblem& problem,
                            const JointResult& result, void* global, int32_t* errors) {
    const int64_t fetched = JointSizes::of(problem).bytes();
    if (W == 1 && global == nullptr && fetched <= shared_limit()) {
      return cuda::launch(
          is_plain(problem) ? plan_joint_fetched_kernel<true> : plan_joint_fetched_kernel<false>, B,
          FetchedTeam::kLanes, fetched, stream, problem, result, errors);
    }
    return cuda::launch(plan_joint_kernel<W>, B, PlanTeam::kLanes, bytes, stream, problem, result, global,
                        errors);
  }
};
ISOLOAD_LAUNCHER(JointPlanner)

}  // namespace isoload::cuda
