// plan_active: checks of loads and ticks.
#include "cpu/cpu.h"
#include "ops/device.h"
#include "ops/loads_batch.h"
#include "ops/ops.h"

namespace isoload::ops {

std::tuple<Tensor, Tensor, Tensor, Tensor> plan_active(const Tensor& loads, const Tensor& tables,
                                                       int64_t num_ranks, int64_t num_slots,
                                                       const std::optional<Tensor>& ticks_in) {
  const LoadsBatch batch(loads, tables, num_ranks, num_slots);
  std::optional<Tensor> ticks;
  if (ticks_in) ticks = batch.checked_ticks(*ticks_in);
  const Tensor quota = batch.per_layer(batch.P), telemetry = batch.per_layer(4);
  const Tensor peak = batch.per_layer(ScalarType::Long), bound = batch.per_layer(ScalarType::Long);
  auto problem_of = [&](int64_t b) {
    ActiveProblem problem{};
    problem.R = static_cast<int>(batch.R);
    problem.E = static_cast<int>(batch.E);
    problem.S = static_cast<int>(batch.P / batch.R);
    problem.tables = batch.tables->layer(b);
    problem.loads = batch.of(b);
    problem.num_sources = static_cast<int>(batch.sources);
    problem.ticks = ticks ? data<int32_t>(*ticks) : nullptr;
    return problem;
  };
  auto result_of = [&](int64_t b) {
    return ActiveResult{mutable_data<int32_t>(quota) + b * batch.P, mutable_data<int64_t>(peak) + b,
                        mutable_data<int64_t>(bound) + b, mutable_data<int32_t>(telemetry) + b * 4};
  };
  if (on_cuda(batch.loads, [&](auto stream) {
        const Scratch scratch(batch.loads, cuda::plan_active_bytes(batch.B, batch.R, batch.E));
        return cuda::plan_active(problem_of(0), result_of(0), batch.B, scratch.data(), stream);
      }))
    return {quota, peak, bound, telemetry};
  for (int64_t b = 0; b < batch.B; ++b)
    if (cpu::plan_active(problem_of(b), result_of(b)) != PlanStatus::ok) batch.explain(b);
  return {quota, peak, bound, telemetry};
}

}  // namespace isoload::ops
