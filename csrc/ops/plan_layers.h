// Tensors with one entry per layer, and a planner over a batch of layers, on the device of its tensors.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>

#include "cpu/planner.h"
#include "ops/device.h"

namespace isoload::ops {

// A batch of B layers, whose tensors have a leading B, or one layer, without; all on the device of `like`.
struct Layers {
  Tensor like;
  const char* like_name;
  bool batched;
  int64_t B;

  Sizes sizes(const Sizes& one) const {
    if (!batched) return one;
    Sizes all{B};
    for (int64_t i = 0; i < one.count; ++i) all.of[all.count++] = one.of[i];
    return all;
  }
  Tensor per_layer(const Sizes& one, ScalarType dtype = ScalarType::Int) const {
    return new_tensor(like, sizes(one), dtype);
  }
  // Of an argument, a tensor or none.
  template <class Given>
  Given checked_per_layer(const Given& given, const char* name, const Sizes& one,
                          ScalarType dtype = ScalarType::Int) const {
    return checked(given, name, dtype, sizes(one), like, like_name);
  }
};

// The copies that ranks carry besides in one layer, which are none where fixed is null.
inline int64_t sum_fixed(const int32_t* fixed, int R) {
  int64_t copies = 0;
  for (int r = 0; fixed && r < R; ++r) {
    require(fixed[r] >= 0, "fixed must not be negative, got ", fixed[r], " for rank ", r);
    copies += fixed[r];
  }
  return copies;
}

// Solves B layers that lie one after another in problem and result, both of tensors on the device of `like`.
// On the CPU `grain` layers at a time in parallel (0: one after another); explain(in, b, refused) raises for
// the first layer that the planner refuses. Whether it ran there: only then its values may be looked at.
template <class Planner, class Explain>
bool plan_layers(const Tensor& like, const typename Planner::Problem& problem,
                 const typename Planner::Result& result, int64_t B, int64_t grain, Explain&& explain) {
  if (on_cuda(like, [&](auto stream) {
        const Scratch scratch(like, cuda::plan_bytes<Planner>(problem, B));
        return cuda::plan<Planner>(problem, result, B, scratch.data(), stream);
      }))
    return false;
  std::atomic<int64_t> failed{B};  // a throw inside parallel_for would lose its text
  auto run = [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      if (cpu::plan<Planner>(problem, result, b) == kPlanned) continue;
      for (int64_t first = failed; b < first && !failed.compare_exchange_weak(first, b);) continue;
      if (grain == 0) return;
    }
  };
  grain == 0 || B == 1 ? run(0, B) : torch::stable::parallel_for(0, B, grain, run);
  if (const int64_t b = failed; b < B) {
    typename Planner::Problem in = problem;
    typename Planner::Result out = result;
    Planner::select(in, out, b);
    explain(in, b, cpu::plan<Planner>(problem, result, b));
  }
  return true;
}

}  // namespace isoload::ops
