// plan_joint: one block per layer of the batch. Of plain problems that fit into shared memory: loads and
// tables are fetched there, and results leave it at the end: no pointer leads anywhere else meanwhile. For
// others the kernels of its parts run one after another, so that none grows beyond an instruction cache.
#include "algorithms/plan_joint.h"
#include "cuda/planner.cuh"

namespace isoload::cuda {

// Of plan_exact.cu, share.cu and plan_waterfill.cu.
ISOLOAD_LAUNCHER(extern, ExactPlanner)
ISOLOAD_LAUNCHER(extern, SharePlanner)
ISOLOAD_LAUNCHER(extern, WaterfillPlanner)

namespace {

struct JointSizes {  // of a block, in int32
  int64_t workspace, tables, P, R;

  __host__ __device__ static JointSizes of(const JointProblem& in) {
    const int64_t R = in.R, P = R * in.S;
    return {padded(JointMemory<1>::bytes(in)) / int64_t(sizeof(int32_t)), ReplicaTables::size(in.E, P), P, R};
  }
  int64_t bytes() const { return (workspace + tables + 2 * P + R * R) * int64_t(sizeof(int32_t)); }
};

bool is_one_kernel(const JointProblem& problem) {
  return JointPlanner::is_plain(problem) && problem.tolerance_ppm == 0 && problem.num_shared == 1 &&
         problem.R <= 64 && JointSizes::of(problem).bytes() <= shared_limit();
}

__global__ void __launch_bounds__(WideTeam::kLanes, 1)
    plan_joint_fetched_kernel(JointProblem in, JointResult result, int32_t* errors) {
  take_turn();
  __shared__ WideTeam::Group group;
  WideTeam team(group);
  JointPlanner::select(in, result, blockIdx.x);
  in.objective = Objective::spread, in.ticks = nullptr, in.tolerance_ppm = 0, in.num_shared = 1;  // less code
  const JointSizes sizes = JointSizes::of(in);
  const JointMemory<1> m = JointMemory<1>::at(shared_memory, in);
  int32_t* const tables = reinterpret_cast<int32_t*>(shared_memory) + sizes.workspace;
  const int64_t width = in.E + in.num_shared;
  for (int s = 0; s < in.R; ++s) fetch(team, in.gathered + s * width, in.E, m.loads + int64_t(s) * in.E);
  team.for_each(in.R, [&](int s) {
    __pipeline_memcpy_async(m.tokens + s, in.gathered + s * width + in.E, sizeof(int32_t));
  });
  fetch(team, in.tables.header, sizes.tables, tables);
  in.tables = ReplicaTables::at(tables, in.E, sizes.P);
  JointResult out = result;
  out.quota = tables + sizes.tables, out.send_counts = out.quota + sizes.P,
  out.share = out.send_counts + sizes.P;
  wait_for_fetched(team);
  const bool planned = JointPlanner::solve(team, in, m, out) == kPlanned;
  if (!planned && team.rank() == 0) {
    *result.peak = *result.bound = -1;
    for (int i = 0; i < 4; ++i) result.telemetry[i] = 0;
    report(errors, kPlanExact);
  }
  team.for_each(static_cast<int>(sizes.P), [&](int p) {
    result.quota[p] = planned ? out.quota[p] : 0;
    result.send_counts[p] = planned ? out.send_counts[p] : 0;
  });
  team.for_each(in.R * in.R, [&](int i) { result.share[i] = planned ? out.share[i] : 0; });
}

// What the parts of a problem hand on, of all B layers; behind it what one part at a time needs.
struct Between : Workspace<Between> {
  int64_t *peak, *bound;                    // [B] of the pour alone
  int32_t *loads, *tokens, *pour, *copies;  // [B, R, E], [B, R], [B], [B, R, R]

  template <class Take>
  ISOLOAD_HD void lay_out(int64_t B, int64_t R, int64_t E, Take&& take) {
    take(B, peak, bound), take(B * R * E, loads), take(B * R, tokens), take(B, pour), take(B * R * R, copies);
  }
  static int64_t bytes_of(const JointProblem& in, int64_t B) { return padded(bytes(B, in.R, in.E)); }
};

// The problems of the parts, of all layers.
struct Parts {
  ExactProblem split;
  ShareProblem row, by_rank;
  WaterfillProblem pour;

  static Parts of(const JointProblem& in, const Between& m, const JointResult& out) {
    ExactProblem split = in;
    split.loads = m.loads, split.fixed = nullptr, split.pour = m.pour;
    const ShareProblem row{in.R,      in.E,    in.S,      in.per_node,      true,
                           in.tables, m.loads, out.quota, ShareOf::one_row, in.rank,
                           out.peak};
    ShareProblem by_rank = row;
    by_rank.of = ShareOf::all_ranks;
    const WaterfillProblem pour{in.R, in.per_node, in.num_shared, m.copies, m.tokens, in.ticks, nullptr};
    return {split, row, by_rank, pour};
  }
  int64_t bytes(int64_t B) const {  // of the one that needs most
    int64_t most = 0;
    for (const int64_t part : {plan_bytes<ExactPlanner>(split, B), plan_bytes<SharePlanner>(row, B),
                               plan_bytes<SharePlanner>(by_rank, B), plan_bytes<WaterfillPlanner>(pour, B)})
      most = part > most ? part : most;
    return most;
  }
};

// Loads and tokens apart, for the kernels behind it: a block per source of a layer, and its first one for the
// tokens. Those that are refused are none there.
__global__ void __launch_bounds__(PlanTeam::kLanes, 1) plan_joint_open_kernel(JointProblem in, Between m) {
  take_turn();
  __shared__ PlanTeam::Group group;
  PlanTeam team(group);
  const uint32_t layer = blockIdx.x / uint32_t(in.R), source = blockIdx.x - layer * in.R;
  const int64_t row = blockIdx.x, width = in.E + in.num_shared;
  const int32_t* const loads = in.gathered + row * width;
  team.for_each(in.E, [&](int e) { m.loads[row * in.E + e] = loads[e]; });
  if (source > 0) return;
  int32_t* const tokens = m.tokens + row;
  team.for_each(in.R, [&](int s) { tokens[s] = loads[s * width + in.E]; });
  const int32_t pour = JointPlanner::pour_of(team, in, tokens);  // by lanes that wrote them
  if (team.rank() == 0) m.pour[layer] = pour;
  if (pour < 0) team.for_each(in.R, [&](int s) { tokens[s] = 0; });
}

// The shared slots' quota; nothing of a layer whose split was refused.
__global__ void __launch_bounds__(PlanTeam::kLanes, 1)
    plan_joint_close_kernel(JointProblem in, JointResult out) {
  take_turn();
  __shared__ PlanTeam::Group group;
  PlanTeam team(group);
  JointPlanner::select(in, out, blockIdx.x);
  if (*out.peak < 0)
    team.for_each(in.R * in.R, [&](int i) { out.share[i] = 0; });
  else
    JointPlanner::add_shared(team, in, out);
}

const char* plan_in_parts(const JointProblem& problem, const JointResult& result, int64_t B, void* global,
                          void* stream) {
  const Between m = Between::at(global, B, problem.R, problem.E);
  void* const workspace = static_cast<char*>(global) + Between::bytes_of(problem, B);
  const Parts parts = Parts::of(problem, m, result);
  const WaterfillResult poured{result.share, m.peak, m.bound};
  auto solve = [&](auto planner, const auto& part, const auto& out) {
    using Planner = decltype(planner);
    return plan<Planner>(part, out, B, plan_bytes<Planner>(part, B) > 0 ? workspace : nullptr, stream);
  };
  const char* error = launch(plan_joint_open_kernel, B * problem.R, PlanTeam::kLanes, 0, stream, problem, m);
  if (!error) error = solve(ExactPlanner(), parts.split, result);
  if (!error) error = solve(SharePlanner(), parts.row, result.send_counts);
  if (!error) error = solve(SharePlanner(), parts.by_rank, m.copies);
  if (!error) error = solve(WaterfillPlanner(), parts.pour, poured);
  if (error) return error;
  return launch(plan_joint_close_kernel, B, PlanTeam::kLanes, 0, stream, problem, result);
}

}  // namespace

template <>
int64_t plan_bytes<JointPlanner>(const JointProblem& problem, int64_t B) {
  if (is_one_kernel(problem)) return 0;
  return Between::bytes_of(problem, B) + Parts::of(problem, Between{}, {}).bytes(B);
}

template <>
const char* plan<JointPlanner>(const JointProblem& problem, const JointResult& result, int64_t B,
                               void* global, void* stream) {
  if (!is_one_kernel(problem)) return plan_in_parts(problem, result, B, global, stream);
  return launch(plan_joint_fetched_kernel, B, WideTeam::kLanes, JointSizes::of(problem).bytes(), stream,
                problem, result, error_word());
}

}  // namespace isoload::cuda
