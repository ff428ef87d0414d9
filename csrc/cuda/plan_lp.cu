// plan_lp: a kernel for each dtype and size. Its steps are many and short: up to 16 ranks one warp takes
// them, whose barriers cost next to nothing; with more, eliminating ranks is most of the work and wants many
// lanes.
#include "algorithms/plan_lp.h"
#include "cuda/planner.cuh"

namespace isoload::cuda {
namespace {

template <int kWarps, class Real>
__global__ void __launch_bounds__(kWarps * 32, 1)
    plan_lp_kernel(LpProblem<Real> problem, LpResult<Real> result, void* global, int32_t* errors) {
  using Team = BlockTeam<kWarps>;
  __shared__ typename Team::Group group;
  Team team(group);
  plan_layer<LpPlanner<Real>, 1>(team, problem, result, global, errors, kPlanLp);
}

}  // namespace

template <class Real>
struct Kernels<LpPlanner<Real>> {
  template <int W, class... Rest>
  static const char* launch(int64_t B, int64_t bytes, void* stream, const LpProblem<Real>& problem,
                            const Rest&... rest) {
    if (problem.R <= 16) return cuda::launch(plan_lp_kernel<1, Real>, B, 32, bytes, stream, problem, rest...);
    return cuda::launch(plan_lp_kernel<8, Real>, B, 256, bytes, stream, problem, rest...);
  }
};
ISOLOAD_LAUNCHER(LpPlanner<float>)
ISOLOAD_LAUNCHER(LpPlanner<double>)

}  // namespace isoload::cuda
