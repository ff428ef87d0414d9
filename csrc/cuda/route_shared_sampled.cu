// route_shared_sampled: a lane per token; every block works out the slack of all ranks for itself, which
// costs less than a launch.
#include "algorithms/route_shared_sampled.h"
#include "cuda/cuda.h"
#include "cuda/launch.cuh"

namespace isoload::cuda {
namespace {

constexpr int kWarps = 8;
using Team = BlockTeam<kWarps>;

template <int W, class Id>
__global__ void __launch_bounds__(Team::kLanes, 1)
    route_shared_sampled_kernel(const Id* slots, int64_t T, int K, SharedDraw in, int32_t* ranks,
                                int32_t* errors) {
  take_turn();
  __shared__ Team::Group group;
  Team team(group);
  const SharedSlack slack = find_slack(team, in, K, reinterpret_cast<int64_t*>(shared_memory));
  const int64_t i = int64_t(blockIdx.x) * Team::kLanes + threadIdx.x, P = int64_t(in.R) * in.slots_per_rank;
  if (i >= T) return;
  RankSet<W> visited;
  for (int k = 0; k < K; ++k) {
    const int64_t slot = slots[i * K + k];
    if (slot >= 0 && slot < P)
      visited.insert(static_cast<int>(slot) / in.slots_per_rank);
    else if (slot != -1)
      report(errors, kSharedSampledSlot);
  }
  ranks[i] = draw_shared(in, slack, T, i, visited, slots + i * K, K);
}

}  // namespace

template <class Id>
const char* route_shared_sampled(const Id* slots, int64_t T, int K, const SharedDraw& draw, int32_t* ranks,
                                 void* stream) {
  return with_words(draw.R, [&](auto W) {
    return launch(route_shared_sampled_kernel<W, Id>, (T + Team::kLanes - 1) / Team::kLanes, Team::kLanes,
                  2 * draw.R * int64_t(sizeof(int64_t)), stream, slots, T, K, draw, ranks, error_word());
  });
}

template const char* route_shared_sampled(const int32_t*, int64_t, int, const SharedDraw&, int32_t*, void*);
template const char* route_shared_sampled(const int64_t*, int64_t, int, const SharedDraw&, int32_t*, void*);

}  // namespace isoload::cuda
