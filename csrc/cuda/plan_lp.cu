// plan_lp: one block per layer of the batch. Its steps are many and short: up to 16 ranks one warp takes
// them, whose barriers cost next to nothing; with more, eliminating ranks is most of the work and wants many
// lanes.
#include "algorithms/plan_lp.h"
#include "cuda/cuda.h"
#include "cuda/launch.cuh"

namespace isoload::cuda {
namespace {

template <int kWarps, class Real>
__global__ void __launch_bounds__(kWarps * 32, 1)
    plan_lp_kernel(LpProblem<Real> problem, LpResult<Real> result, void* global, int32_t* errors) {
  using Team = BlockTeam<kWarps>;
  __shared__ typename Team::Group group;
  Team team(group);
  const int64_t b = blockIdx.x, E = problem.E, R = problem.R, P = R * problem.S;
  problem.tables = problem.tables.layer(b, E, P);
  problem.loads += b * problem.num_sources * E;
  if (problem.base) problem.base += b * R;
  const LpResult<Real> mine{result.split + b * P, result.primal + b, result.dual + b, result.iterations + b,
                            result.status + b};
  const LpWorkspace<Real> workspace(block_workspace(global, LpWorkspace<Real>::size(R, E, P)), R, E, P);
  if (LpSolver<Real, Team>(team, problem, workspace).solve(mine)) return;
  team.sync();
  team.for_each(static_cast<int>(P), [&](int p) { mine.split[p] = 0; });
  if (team.rank() > 0) return;
  report(errors, kPlanLp);
  *mine.primal = *mine.dual = -1;
  *mine.iterations = 0;
  *mine.status = static_cast<int32_t>(LpStatus::broke_down);
}

}  // namespace

template <class Real>
int64_t plan_lp_bytes(int64_t B, int R, int E, int S) {
  return global_bytes(B, LpWorkspace<Real>::size(R, E, int64_t(R) * S));
}

template <class Real>
const char* plan_lp(const LpProblem<Real>& problem, const LpResult<Real>& result, int64_t B, void* global,
                    void* stream) {
  const int R = problem.R, E = problem.E;
  const int64_t bytes = global ? 0 : LpWorkspace<Real>::size(R, E, int64_t(R) * problem.S);
  if (R <= 16)
    return launch(plan_lp_kernel<1, Real>, B, 32, bytes, stream, problem, result, global, error_word());
  return launch(plan_lp_kernel<8, Real>, B, 256, bytes, stream, problem, result, global, error_word());
}

template int64_t plan_lp_bytes<float>(int64_t, int, int, int);
template int64_t plan_lp_bytes<double>(int64_t, int, int, int);
template const char* plan_lp(const LpProblem<float>&, const LpResult<float>&, int64_t, void*, void*);
template const char* plan_lp(const LpProblem<double>&, const LpResult<double>&, int64_t, void*, void*);

}  // namespace isoload::cuda
