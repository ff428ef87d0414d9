// plan_active: checks of loads and ticks.
#include "cpu/cpu.h"
#include "ops/device.h"
#include "ops/ops.h"
#include "ops/tensors.h"

namespace isoload::ops {

// Raises what the solver refused: it only knows that something is wrong, and here there is time to look.
static void explain(const ActiveProblem& problem) {
  int64_t copies = 0, lonely = -1;
  for (int64_t i = 0; i < int64_t(problem.num_sources) * problem.E; ++i) {
    const int64_t e = i % problem.E, n = problem.loads[i];
    require(n >= 0, "loads must not be negative, got ", n, " for expert ", e);
    if (n > 0 && problem.tables.copies(static_cast<int>(e)) == 0 && lonely < 0) lonely = e;
    copies += n;
  }
  require(copies <= INT32_MAX, "loads must sum to less than 2^31 copies, got ", copies);
  require(lonely < 0, "loads must be 0 for an expert without a replica, got copies for expert ", lonely);
}

static Tensor check_ticks(const Tensor& ticks_in, int64_t R) {
  require_dtype(ticks_in, "ticks", ScalarType::Int);
  require_shape(ticks_in, "ticks", {R});
  const Tensor ticks = dense(ticks_in);
  for (int64_t r = 0; r < R && ticks.is_cpu(); ++r) {
    const int32_t tick = data<int32_t>(ticks)[r];
    require(tick >= 1 && tick <= 1 << 20, "ticks must be in 1..2^20, got ", tick, " for rank ", r);
  }
  return ticks;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> plan_active(const Tensor& loads_in, const Tensor& tables_in,
                                                       int64_t num_ranks, int64_t num_slots,
                                                       const std::optional<Tensor>& ticks_in) {
  require_dtype(loads_in, "loads", ScalarType::Int);
  const int64_t R = num_ranks, P = num_slots;
  require(R >= 1 && R <= kMaxRanks, "num_ranks must be in 1..", kMaxRanks, ", got ", R);
  require(P >= R && P % R == 0, "num_slots must be a multiple of num_ranks=", R, ", got ", P);
  const Tensor loads = dense(loads_in);
  const bool batched = tables_in.dim() == 2;
  const int64_t dims = loads.dim() - batched;
  require(dims == 1 || (dims == 2 && loads.size(batched) == R), "loads must be [E] or [", R,
          ", E] per layer, got ", shape_text(loads));
  const int64_t E = loads.size(loads.dim() - 1), sources = dims == 1 ? 1 : R;
  const Tables tables(tables_in, P, E);
  const int64_t B = tables.batch;
  require(!batched || loads.size(0) == B, "loads must have one entry per layer (", B, "), got ",
          shape_text(loads));
  require_device(tables_in, "tables", loads_in, "loads");
  std::optional<Tensor> ticks;
  if (ticks_in) {
    require_device(*ticks_in, "ticks", loads_in, "loads");
    ticks = check_ticks(*ticks_in, R);
  }
  auto per_layer = [&](int64_t length) {
    return batched ? new_empty(loads, {B, length}) : new_empty(loads, {length});
  };
  auto number = [&] {
    return batched ? new_empty(loads, {B}, ScalarType::Long) : new_empty(loads, {}, ScalarType::Long);
  };
  const Tensor quota = per_layer(P), telemetry = per_layer(4), peak = number(), bound = number();
  auto problem_of = [&](int64_t b) {
    ActiveProblem problem{};
    problem.R = static_cast<int>(R);
    problem.E = static_cast<int>(E);
    problem.S = static_cast<int>(P / R);
    problem.tables = tables.layer(b);
    problem.loads = data<int32_t>(loads) + b * sources * E;
    problem.num_sources = static_cast<int>(sources);
    problem.ticks = ticks ? data<int32_t>(*ticks) : nullptr;
    return problem;
  };
  auto result_of = [&](int64_t b) {
    return ActiveResult{mutable_data<int32_t>(quota) + b * P, mutable_data<int64_t>(peak) + b,
                        mutable_data<int64_t>(bound) + b, mutable_data<int32_t>(telemetry) + b * 4};
  };
  if (on_cuda(loads, [&](auto stream) {
        const Scratch scratch(loads, cuda::plan_active_bytes(B, R, E));
        return cuda::plan_active(problem_of(0), result_of(0), B, scratch.data(), stream);
      }))
    return {quota, peak, bound, telemetry};
  for (int64_t b = 0; b < B; ++b)
    if (cpu::plan_active(problem_of(b), result_of(b)) != PlanStatus::ok) explain(problem_of(b));
  return {quota, peak, bound, telemetry};
}

}  // namespace isoload::ops
