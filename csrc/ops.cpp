// The index of the library: every op's schema and registration, in pipeline order, and its CPU side's checks.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <optional>
#include <tuple>

#include "check.h"
#include "cpu/cpu.h"

namespace isoload::ops {

// A new tensor on the device of `like`. Straight through the C shim: going by the dispatcher's string look-up
// costs a microsecond per tensor, a third of a whole plan.
Tensor new_empty(const Tensor& like, std::initializer_list<int64_t> sizes,
                 ScalarType dtype = ScalarType::Int) {
  int32_t device_type, device_index;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  int64_t strides[4], stride = 1;
  for (std::size_t i = sizes.size(); i-- > 0; stride *= sizes.begin()[i]) strides[i] = stride;
  const int32_t code = dtype == ScalarType::Int ? aoti_torch_dtype_int32() : aoti_torch_dtype_int64();
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides,
                                                  code, device_type, device_index, &handle));
  return Tensor(handle);
}

Tensor dense(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

template <class T>
const T* data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}
template <class T>
T* mutable_data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// The tables of a batch of layers: [..., size], with P slots each.
struct Tables {
  Tables(const Tensor& tensor, int64_t num_slots, int64_t num_experts)
      : owner(dense(tensor)), P(num_slots), E(num_experts) {
    require_dtype(tensor, "tables", ScalarType::Int);
    const int64_t size = ReplicaTables::size(E, P);
    require(tensor.dim() == 1 || tensor.dim() == 2, "tables must have 1 or 2 dimensions, got ", tensor.dim());
    require(tensor.size(tensor.dim() - 1) == size, "tables must be those of ", E, " experts in ", P,
            " slots (", size, " ints), got ", tensor.size(tensor.dim() - 1));
    batch = tensor.dim() == 2 ? tensor.size(0) : 1;
  }
  ReplicaTables layer(int64_t b) const {
    return ReplicaTables::at(data<int32_t>(owner) + b * ReplicaTables::size(E, P), E, P);
  }
  Tensor owner;
  int64_t P, E, batch;
};

void check_route(const cpu::RouteFault& fault, int64_t E) {
  require(fault.kind != cpu::RouteFault::bad_id, "topk_ids must be in -1..", E - 1, ", got ", fault.value);
  require(fault.kind != cpu::RouteFault::not_the_share,
          "topk_ids must hold each expert as often as its share says, ", "expert ", fault.value, " does not");
}

Tensor count(const Tensor& topk_ids, int64_t num_experts) {
  require_ids(topk_ids, "topk_ids");
  require(num_experts >= 1, "num_experts must be at least 1, got ", num_experts);
  const Tensor ids = dense(topk_ids);
  Tensor counts = new_empty(topk_ids, {num_experts}, ScalarType::Int);
  require(ids.numel() <= INT32_MAX, "topk_ids must have fewer than 2^31 entries, got ", ids.numel());
  const int E = static_cast<int>(num_experts);
  const int64_t bad = ids.scalar_type() == ScalarType::Int
                          ? cpu::count(data<int32_t>(ids), ids.numel(), E, mutable_data<int32_t>(counts))
                          : cpu::count(data<int64_t>(ids), ids.numel(), E, mutable_data<int32_t>(counts));
  require(bad == -1, "topk_ids must be in -1..", num_experts - 1, ", got ", bad);
  return counts;
}

void replica_tables(const Tensor& slot_to_expert, int64_t num_ranks, int64_t num_experts, Tensor tables) {
  require_dtype(slot_to_expert, "slot_to_expert", ScalarType::Int);
  require(slot_to_expert.dim() == 1 || slot_to_expert.dim() == 2,
          "slot_to_expert must be [P] or [L, P], got ", shape_text(slot_to_expert));
  require(num_experts >= 1, "num_experts must be at least 1, got ", num_experts);
  const Tensor slots = dense(slot_to_expert);
  const int64_t P = slots.size(slots.dim() - 1);
  require(num_ranks >= 1 && num_ranks <= kMaxRanks, "num_ranks must be in 1..", kMaxRanks, ", got ",
          num_ranks);
  require(P >= num_ranks && P % num_ranks == 0,
          "slot_to_expert must have a multiple of num_ranks=", num_ranks, " slots, got ", P);
  const Tables checked(tables, P, num_experts);
  require(tables.is_contiguous() && checked.batch * P == slots.numel(),
          "tables must be contiguous, one row per layer of slot_to_expert ", shape_text(slots), ", got ",
          shape_text(tables));
  for (int64_t b = 0; b < checked.batch; ++b)
    cpu::replica_tables(data<int32_t>(slots) + b * P, num_ranks, num_experts, P / num_ranks,
                        mutable_data<int32_t>(tables) + b * ReplicaTables::size(num_experts, P));
}

// A batch of exact splits: its inputs, checked, and its results.
class ExactBatch {
 public:
  ExactBatch(const Tensor& loads_in, const Tensor& tables_in, int64_t num_ranks, int64_t num_slots)
      : loads_(dense(loads_in)), batched_(tables_in.dim() == 2), R_(num_ranks), P_(num_slots) {
    require_dtype(loads_in, "loads", ScalarType::Int);
    require(R_ >= 1 && R_ <= kMaxRanks, "num_ranks must be in 1..", kMaxRanks, ", got ", R_);
    require(P_ >= R_ && P_ % R_ == 0, "num_slots must be a multiple of num_ranks=", R_, ", got ", P_);
    const int64_t dims = loads_.dim() - batched_;
    require(dims == 1 || (dims == 2 && loads_.size(batched_) == R_), "loads must be [E] or [", R_,
            ", E] per layer, got ", shape_text(loads_));
    E_ = loads_.size(loads_.dim() - 1);
    sources_ = dims == 1 ? 1 : R_;
    tables_.emplace(tables_in, P_, E_);
    require(!batched_ || loads_.size(0) == tables_->batch, "loads must have one entry per layer (",
            tables_->batch, "), got ", shape_text(loads_));
  }

  void add_fixed(const Tensor& fixed) {
    require_dtype(fixed, "fixed", ScalarType::Int);
    batched_ ? require_shape(fixed, "fixed", {tables_->batch, R_}) : require_shape(fixed, "fixed", {R_});
    fixed_ = dense(fixed);
  }

  void add_ticks(const Tensor& ticks) {
    require_dtype(ticks, "ticks", ScalarType::Int);
    require_shape(ticks, "ticks", {R_});
    ticks_ = dense(ticks);
    for (int64_t r = 0; r < R_; ++r) {
      const int32_t tick = data<int32_t>(*ticks_)[r];
      require(tick >= 1 && tick <= 1 << 20, "ticks must be in 1..2^20, got ", tick, " for rank ", r);
    }
  }

  std::tuple<Tensor, Tensor, Tensor, Tensor> solve(int64_t tolerance_ppm, int64_t sweeps, int64_t budget) {
    require(sweeps >= 0 && sweeps <= INT32_MAX, "sweeps must be in 0..2^31-1, got ", sweeps);
    require(budget >= 0 && budget <= INT32_MAX, "budget must be in 0..2^31-1, got ", budget);
    const int64_t B = tables_->batch;
    const Tensor quota = per_layer(P_), telemetry = per_layer(4), peak = per_layer(), bound = per_layer();
    std::atomic<int64_t> failed{B};  // a throw inside parallel_for would lose its text
    auto run = [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        ExactProblem problem = this->problem(b);
        problem.tolerance_ppm = tolerance_ppm;
        problem.sweeps = static_cast<int32_t>(sweeps);
        problem.budget = static_cast<int32_t>(budget);
        const ExactResult result{mutable_data<int32_t>(quota) + b * P_, mutable_data<int64_t>(peak) + b,
                                 mutable_data<int64_t>(bound) + b, mutable_data<int32_t>(telemetry) + b * 4};
        if (cpu::plan_exact(problem, result) == PlanStatus::ok) continue;
        for (int64_t first = failed; b < first && !failed.compare_exchange_weak(first, b);) continue;
      }
    };
    B == 1 ? run(0, 1) : torch::stable::parallel_for(0, B, 8, run);
    if (failed < B) explain(problem(failed));
    return {quota, peak, bound, telemetry};
  }

 private:
  Tensor per_layer(int64_t length) const {
    return batched_ ? new_empty(loads_, {tables_->batch, length}) : new_empty(loads_, {length});
  }
  Tensor per_layer() const {
    return batched_ ? new_empty(loads_, {tables_->batch}, ScalarType::Long)
                    : new_empty(loads_, {}, ScalarType::Long);
  }

  ExactProblem problem(int64_t b) const {
    ExactProblem problem{};
    problem.R = static_cast<int>(R_);
    problem.E = static_cast<int>(E_);
    problem.S = static_cast<int>(P_ / R_);
    problem.tables = tables_->layer(b);
    problem.loads = data<int32_t>(loads_) + b * sources_ * E_;
    problem.num_sources = static_cast<int>(sources_);
    problem.fixed = fixed_ ? data<int32_t>(*fixed_) + b * R_ : nullptr;
    problem.ticks = ticks_ ? data<int32_t>(*ticks_) : nullptr;
    return problem;
  }

  // Raises what the solver refused: it only knows that something is wrong, and here there is time to look.
  static void explain(const ExactProblem& problem) {
    int64_t copies = 0, lonely = -1;
    for (int64_t i = 0; i < int64_t(problem.num_sources) * problem.E; ++i) {
      const int64_t e = i % problem.E, n = problem.loads[i];
      require(n >= 0, "loads must not be negative, got ", n, " for expert ", e);
      if (n > 0 && problem.tables.copies(static_cast<int>(e)) == 0 && lonely < 0) lonely = e;
      copies += n;
    }
    for (int r = 0; problem.fixed && r < problem.R; ++r) {
      require(problem.fixed[r] >= 0, "fixed must not be negative, got ", problem.fixed[r], " for rank ", r);
      copies += problem.fixed[r];
    }
    require(copies <= INT32_MAX, "loads and fixed must sum to less than 2^31 copies, got ", copies);
    require(lonely < 0, "loads must be 0 for an expert without a replica, got copies for expert ", lonely);
  }

  Tensor loads_;
  bool batched_;
  int64_t R_, P_, E_ = 0, sources_ = 0;
  std::optional<Tables> tables_;
  std::optional<Tensor> fixed_, ticks_;
};

std::tuple<Tensor, Tensor, Tensor, Tensor> plan_exact(const Tensor& loads, const Tensor& tables,
                                                      int64_t num_ranks, int64_t num_slots,
                                                      const std::optional<Tensor>& fixed,
                                                      const std::optional<Tensor>& ticks,
                                                      int64_t tolerance_ppm, int64_t sweeps, int64_t budget) {
  ExactBatch batch(loads, tables, num_ranks, num_slots);
  if (fixed) batch.add_fixed(*fixed);
  if (ticks) batch.add_ticks(*ticks);
  return batch.solve(tolerance_ppm, sweeps, budget);
}

Tensor share(const Tensor& loads_in, const Tensor& quota_in, const Tensor& tables_in, int64_t ranks_per_node,
             int64_t rank, bool locality) {
  require_dtype(loads_in, "loads", ScalarType::Int);
  require_dtype(quota_in, "quota", ScalarType::Int);
  require(loads_in.dim() == 2 || loads_in.dim() == 3, "loads must be [R, E] or [L, R, E], got ",
          shape_text(loads_in));
  require(quota_in.dim() == loads_in.dim() - 1, "quota must be [P] or [L, P] like loads, got ",
          shape_text(quota_in));
  const Tensor loads = dense(loads_in), quota = dense(quota_in);
  const int64_t R = loads.size(loads.dim() - 2), E = loads.size(loads.dim() - 1),
                P = quota.size(quota.dim() - 1);
  const Tables tables(tables_in, P, E);
  require(tables_in.dim() == quota.dim(), "tables must be of one layer, or of as many as loads, got ",
          shape_text(tables_in));
  const bool batched = loads.dim() == 3;
  const int64_t B = tables.batch;
  require(P % R == 0, "quota must have a multiple of ", R, " slots, got ", P);
  require(rank >= -1 && rank < R, "rank must be in 0..", R - 1, ", got ", rank);
  require(ranks_per_node >= 1 && R % ranks_per_node == 0, "ranks_per_node must divide ", R, ", got ",
          ranks_per_node);
  require(!batched || (loads.size(0) == B && quota.size(0) == B),
          "loads and quota must have one entry per layer (", B, "), got ", shape_text(loads), " and ",
          shape_text(quota));
  const int64_t first = rank < 0 ? 0 : rank, last = rank < 0 ? R : rank + 1;
  Tensor out = rank < 0 ? (batched ? new_empty(loads, {B, R, P}) : new_empty(loads, {R, P}))
                        : (batched ? new_empty(loads, {B, P}) : new_empty(loads, {P}));
  for (int64_t b = 0; b < B; ++b) {
    ShareProblem problem{};
    problem.R = static_cast<int>(R);
    problem.E = static_cast<int>(E);
    problem.S = static_cast<int>(P / R);
    problem.per_node = static_cast<int>(locality ? ranks_per_node : R);
    problem.locality = locality;
    problem.tables = tables.layer(b);
    problem.loads = data<int32_t>(loads) + b * R * E;
    problem.quota = data<int32_t>(quota) + b * P;
    problem.first_row = static_cast<int>(first);
    problem.last_row = static_cast<int>(last);
    const int bad = cpu::share(problem, mutable_data<int32_t>(out) + b * (last - first) * P);
    require(bad == -1, "quota must conserve loads: that of expert ", bad, " was not made from these loads");
  }
  return out;
}

Tensor route(const Tensor& topk_ids, const Tensor& share_row_in, const Tensor& tables_in, int64_t num_experts,
             bool prefer_visited) {
  require_ids(topk_ids, "topk_ids");
  require(topk_ids.dim() == 2, "topk_ids must be [T, K], got ", shape_text(topk_ids));
  require_dtype(share_row_in, "share_row", ScalarType::Int);
  require(share_row_in.dim() == 1, "share_row must be [P], got ", shape_text(share_row_in));
  const Tensor ids = dense(topk_ids), share_row = dense(share_row_in);
  const int64_t P = share_row.size(0), T = ids.size(0), K = ids.size(1);
  const Tables tables(tables_in, P, num_experts);
  require(tables_in.dim() == 1, "tables must be of one layer, got ", shape_text(tables_in));
  Tensor slots = new_empty(ids, {ids.size(0), ids.size(1)}, ids.scalar_type());
  auto run = [&](auto id) {
    using Id = decltype(id);
    return cpu::route(data<Id>(ids), T, K, num_experts, P, tables.layer(0), data<int32_t>(share_row),
                      prefer_visited, mutable_data<Id>(slots));
  };
  check_route(ids.scalar_type() == ScalarType::Int ? run(int32_t()) : run(int64_t()), num_experts);
  return slots;
}

Tensor route_sampled(const Tensor& topk_ids, const Tensor& weights_in, const Tensor& tables_in,
                     int64_t num_experts, int64_t seed) {
  require_ids(topk_ids, "topk_ids");
  require(topk_ids.dim() == 2, "topk_ids must be [T, K], got ", shape_text(topk_ids));
  require_dtype(weights_in, "weights", ScalarType::Float);
  require(weights_in.dim() == 1, "weights must be [P], got ", shape_text(weights_in));
  const Tensor ids = dense(topk_ids), weights = dense(weights_in);
  const Tables tables(tables_in, weights.size(0), num_experts);
  require(tables_in.dim() == 1, "tables must be of one layer, got ", shape_text(tables_in));
  Tensor slots = new_empty(ids, {ids.size(0), ids.size(1)}, ids.scalar_type());
  auto run = [&](auto id) {
    using Id = decltype(id);
    return cpu::route_sampled(data<Id>(ids), ids.numel(), num_experts, tables.layer(0), data<float>(weights),
                              static_cast<uint64_t>(seed), mutable_data<Id>(slots));
  };
  const cpu::RouteFault fault = ids.scalar_type() == ScalarType::Int ? run(int32_t()) : run(int64_t());
  if (fault.kind == cpu::RouteFault::bad_weight)
    require(false, "weights must be finite and not negative, got ", data<float>(weights)[fault.value],
            " for slot ", fault.value);
  require(fault.kind != cpu::RouteFault::not_the_share,
          "weights must be positive for a replica of every expert that is ", "routed, expert ", fault.value,
          " has none");
  check_route(fault, num_experts);
  return slots;
}

}  // namespace isoload::ops

STABLE_TORCH_LIBRARY(isoload, m) {
  m.def("count(Tensor topk_ids, int num_experts) -> Tensor");
  m.def("replica_tables(Tensor slot_to_expert, int num_ranks, int num_experts, Tensor(a!) tables) -> ()");
  m.def(
      "plan_exact(Tensor loads, Tensor tables, int num_ranks, int num_slots, Tensor? fixed, Tensor? ticks, "
      "int tolerance_ppm, int sweeps, int budget) -> (Tensor quota, Tensor peak, Tensor bound, Tensor "
      "telemetry)");
  m.def(
      "share(Tensor loads, Tensor quota, Tensor tables, int ranks_per_node, int rank, bool locality) -> "
      "Tensor");
  m.def(
      "route(Tensor topk_ids, Tensor share_row, Tensor tables, int num_experts, bool prefer_visited) -> "
      "Tensor");
  m.def("route_sampled(Tensor topk_ids, Tensor weights, Tensor tables, int num_experts, int seed) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(isoload, CPU, m) {
  m.impl("count", TORCH_BOX(&isoload::ops::count));
  m.impl("replica_tables", TORCH_BOX(&isoload::ops::replica_tables));
  m.impl("plan_exact", TORCH_BOX(&isoload::ops::plan_exact));
  m.impl("share", TORCH_BOX(&isoload::ops::share));
  m.impl("route", TORCH_BOX(&isoload::ops::route));
  m.impl("route_sampled", TORCH_BOX(&isoload::ops::route_sampled));
}
