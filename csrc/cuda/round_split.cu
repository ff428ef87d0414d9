// round_split: a kernel for each dtype.
#include "algorithms/round_split.h"
#include "cuda/planner.cuh"

namespace isoload::cuda {
namespace {

template <class Real>
__global__ void __launch_bounds__(PlanTeam::kLanes, 1)
    round_split_kernel(RoundingProblem<Real> problem, int32_t* quota, void* global, int32_t* errors) {
  __shared__ PlanTeam::Group group;
  PlanTeam team(group);
  plan_layer<RoundingPlanner<Real>, 1>(team, problem, quota, global, errors, kRoundSplit);
}

}  // namespace

template <class Real>
struct Kernels<RoundingPlanner<Real>> {
  template <int W, class... Arguments>
  static const char* launch(int64_t B, int64_t bytes, void* stream, const Arguments&... arguments) {
    return cuda::launch(round_split_kernel<Real>, B, PlanTeam::kLanes, bytes, stream, arguments...);
  }
};
ISOLOAD_LAUNCHER(, RoundingPlanner<float>)
ISOLOAD_LAUNCHER(, RoundingPlanner<double>)

}  // namespace isoload::cuda
