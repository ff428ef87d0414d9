// route_numbered: a look-up per copy, a block per part of the tokens.
#include "cuda/look_up.cuh"

namespace isoload::cuda {
namespace {

template <int kTurns, bool kShared, class Id>
__global__ void __launch_bounds__(LookUpTeam::kLanes, 1) route_numbered_kernel(Numbers<Id> in) {
  take_turn();
  __shared__ LookUpTeam::Group group;
  LookUpTeam team(group);
  look_up_part<kTurns, kShared>(team, in, reinterpret_cast<int32_t*>(shared_memory), [](int64_t, int) {});
}

}  // namespace

template <class Id>
const char* route_numbered(const Id* ids, int64_t T, int K, int E, int P, const ReplicaTables& tables,
                           const Numbered& numbered, const SharedColumns& shared, const int32_t* source_quota,
                           Id* slots, void* stream) {
  const int64_t bytes = Lists::bytes(E, P);
  if (bytes > shared_limit()) return "more experts or slots than a block can list";
  const Numbers<Id> in = numbers_of(ids, T, K, E, P, tables, numbered, shared, source_quota, slots);
  const bool once = in.part <= LookUpTeam::kLanes;
  auto* const kernel = shared.n == 0 ? once ? route_numbered_kernel<1, false, Id>
                                            : route_numbered_kernel<kMostTurns, false, Id>
                       : once        ? route_numbered_kernel<1, true, Id>
                                     : route_numbered_kernel<kMostTurns, true, Id>;
  return launch(kernel, in.n > 0 ? cpu::num_parts(T) : 0, LookUpTeam::kLanes, bytes, stream, in);
}

template const char* route_numbered(const int32_t*, int64_t, int, int, int, const ReplicaTables&,
                                    const Numbered&, const SharedColumns&, const int32_t*, int32_t*, void*);
template const char* route_numbered(const int64_t*, int64_t, int, int, int, const ReplicaTables&,
                                    const Numbered&, const SharedColumns&, const int32_t*, int64_t*, void*);

}  // namespace isoload::cuda
