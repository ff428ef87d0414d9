// A planner over a batch of layers, on the device of its tensors.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>

#include "cpu/planner.h"
#include "ops/device.h"

namespace isoload::ops {

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
