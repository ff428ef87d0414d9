// balance_same: the kernels of count, plan_exact and route; the other ranks' loads are 0.
#include "algorithms/plan_exact.h"
#include "cuda/cuda.h"
#include "cuda/launch.cuh"

namespace isoload::cuda {

// Of plan_exact.cu.
ISOLOAD_LAUNCHER(extern, ExactPlanner)

// What the plan wants, numbers [n], parts [C, E].
int64_t balance_same_bytes(int64_t T, int K, const ExactProblem& in) {
  return padded(plan_bytes<ExactPlanner>(in, 1)) +
         (T * K + cpu::num_parts(T) * in.E) * int64_t(sizeof(int32_t));
}

template <class Id>
const char* balance_same(const Id* ids, int64_t T, int K, const ExactProblem& in, int32_t* loads,
                         const ExactResult& out, Id* slots, void* global, void* stream) {
  const int64_t of_plan = plan_bytes<ExactPlanner>(in, 1);
  auto* const numbers = reinterpret_cast<int32_t*>(static_cast<char*>(global) + padded(of_plan));
  int32_t* const parts = numbers + T * K;
  const int64_t others = (in.R - 1) * int64_t(in.E) * int64_t(sizeof(int32_t));
  const char* error = refused(cudaMemsetAsync(loads + in.E, 0, others, static_cast<cudaStream_t>(stream)));
  if (!error)
    error = count(ids, T, K, in.E, 0, static_cast<Id*>(nullptr), cpu::Counts{loads, numbers, parts}, stream);
  if (!error) error = plan<ExactPlanner>(in, out, 1, of_plan > 0 ? global : nullptr, stream);
  const Route route_in{T, K, in.E, in.R * in.S, in.tables, {numbers, parts, in.E}, out.quota, {}};
  return error ? error : route(route_in, ids, slots, nullptr, stream);
}

template const char* balance_same(const int32_t*, int64_t, int, const ExactProblem&, int32_t*,
                                  const ExactResult&, int32_t*, void*, void*);
template const char* balance_same(const int64_t*, int64_t, int, const ExactProblem&, int32_t*,
                                  const ExactResult&, int64_t*, void*, void*);

}  // namespace isoload::cuda
