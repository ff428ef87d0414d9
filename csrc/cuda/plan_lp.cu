// plan_lp: a kernel for each dtype and size. Up to 64 ranks a mesh lies in the registers of one warp; the
// block has as many lanes as there are parts. With more ranks, eliminating them is most of the work and wants
// many lanes.
#include "algorithms/plan_lp.h"
#include "cuda/planner.cuh"

namespace isoload::cuda {
namespace {

template <class Real>
__global__ void __launch_bounds__(WideTeam::kLanes, 1)
    plan_lp_kernel(LpProblem<Real> problem, LpResult<Real> result, void* global, int32_t* errors) {
  __shared__ WideTeam::Group group;
  WideTeam team(group);
  plan_layer<LpPlanner<Real>, 1>(team, problem, result, global, errors, kPlanLp);
}

// The workspace is in shared memory, and no other pointer is in this kernel's iterations.
template <int kMostRanks, int kWarps, class Real>
__global__ void __launch_bounds__(kWarps * 32, 1)
    plan_lp_columns_kernel(LpProblem<Real> problem, LpResult<Real> result, int32_t* errors) {
  using Team = BlockTeam<kWarps, true>;
  __shared__ typename Team::Group group;
  Team team(group);
  plan_layer<LpPlanner<Real, kMostRanks>, 1>(team, problem, result, nullptr, errors, kPlanLp);
}

}  // namespace

template <class Real>
struct Kernels<LpPlanner<Real>> {
  template <int W>
  static const char* launch(int64_t B, int64_t bytes, void* stream, const LpProblem<Real>& problem,
                            const LpResult<Real>& result, void* global, int32_t* errors) {
    if (problem.R <= 32 && global == nullptr)
      return cuda::launch(plan_lp_columns_kernel<32, 4, Real>, B, 4 * 32, bytes, stream, problem, result,
                          errors);
    if (problem.R <= 64 && global == nullptr)
      return cuda::launch(plan_lp_columns_kernel<64, 8, Real>, B, 8 * 32, bytes, stream, problem, result,
                          errors);
    return cuda::launch(plan_lp_kernel<Real>, B, WideTeam::kLanes, bytes, stream, problem, result, global,
                        errors);
  }
};
ISOLOAD_LAUNCHER(, LpPlanner<float>)
ISOLOAD_LAUNCHER(, LpPlanner<double>)

}  // namespace isoload::cuda
