// plan_lp: a kernel for each dtype and size. Up to 64 ranks a mesh lies in the registers of one warp; the block
// has as many lanes as there are parts. With more ranks, eliminating them is most of the work and wants many
// lanes.
#include "algorithms/plan_lp.h"
#include "cuda/planner.cuh"

namespace isoload::cuda {
namespace {

template <int kMostRanks, int kWarps, class Real>
__global__ void __launch_bounds__(kWarps * 32, 1)
    plan_lp_kernel(LpProblem<Real> problem, LpResult<Real> result, void* global, int32_t* errors) {
  using Team = BlockTeam<kWarps, true>;
  __shared__ typename Team::Group group;
  Team team(group);
  plan_layer<LpPlanner<Real, kMostRanks>, 1>(team, problem, result, global, errors, kPlanLp);
}

}  // namespace

template <class Real>
struct Kernels<LpPlanner<Real>> {
  template <int W, class... Rest>
  static const char* launch(int64_t B, int64_t bytes, void* stream, const LpProblem<Real>& problem,
                            const Rest&... rest) {
    auto with = [&](auto kernel, int warps) {
      return cuda::launch(kernel, B, warps * 32, bytes, stream, problem, rest...);
    };
    if (problem.R <= 32) return with(plan_lp_kernel<32, 4, Real>, 4);
    if (problem.R <= 64) return with(plan_lp_kernel<64, 8, Real>, 8);
    return with(plan_lp_kernel<0, 8, Real>, 8);
  }
};
ISOLOAD_LAUNCHER(LpPlanner<float>)
ISOLOAD_LAUNCHER(LpPlanner<double>)

}  // namespace isoload::cuda
