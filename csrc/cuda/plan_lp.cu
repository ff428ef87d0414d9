// plan_lp: a kernel per dtype and size. Eliminating one of up to 32 rows has work for four warps, of more
// rows for eight. A workspace in shared memory has kernels of its own, whose loads need no address space at
// run time.
#include "algorithms/plan_lp.h"
#include "cuda/planner.cuh"

namespace isoload::cuda {
namespace {

template <int kWarps, bool kShared, class Real>
__global__ void __launch_bounds__(kWarps * 32, 1)
    plan_lp_kernel(LpProblem<Real> problem, LpResult<Real> result, void* global, int32_t* errors) {
  using Team = BlockTeam<kWarps, true>;
  __shared__ typename Team::Group group;
  Team team(group);
  plan_layer<LpPlanner<Real>, 1>(team, problem, result, kShared ? nullptr : global, errors, kPlanLp);
}

}  // namespace

template <class Real>
struct Kernels<LpPlanner<Real>> {
  template <int W>
  static const char* launch(int64_t B, int64_t bytes, void* stream, const LpProblem<Real>& problem,
                            const LpResult<Real>& result, void* global, int32_t* errors) {
    const int warps = problem.R <= 32 && global == nullptr ? 4 : 8;
    const auto kernel = global       ? plan_lp_kernel<8, false, Real>
                        : warps == 4 ? plan_lp_kernel<4, true, Real>
                                     : plan_lp_kernel<8, true, Real>;
    return cuda::launch(kernel, B, warps * 32, bytes, stream, problem, result, global, errors);
  }
};
ISOLOAD_LAUNCHER(, LpPlanner<float>)
ISOLOAD_LAUNCHER(, LpPlanner<double>)

}  // namespace isoload::cuda
