// The loads and tables of a batch of layers, checked: what all that split loads begin with.
#pragma once

#include "ops/device.h"
#include "ops/tables.h"
#include "ops/tensors.h"

namespace isoload::ops {

struct LoadsBatch {
  // num_shared: columns of shared experts behind those of the tables' E.
  LoadsBatch(const Tensor& loads_in, const Tensor& tables_in, int64_t num_ranks, int64_t num_slots,
             int64_t num_shared = 0)
      : loads(dense(loads_in)), batched(tables_in.dim() == 2), R(num_ranks), P(num_slots) {
    require_dtype(loads_in, "loads", ScalarType::Int);
    require(R >= 1 && R <= kMaxRanks, "num_ranks must be in 1..", kMaxRanks, ", got ", R);
    require(P >= R && P % R == 0, "num_slots must be a multiple of num_ranks=", R, ", got ", P);
    const int64_t dims = loads.dim() - batched;
    require(dims == 1 || (dims == 2 && loads.size(batched) == R), "loads must be [E] or [", R,
            ", E] per layer, got ", shape_text(loads));
    width = loads.size(loads.dim() - 1), E = width - num_shared;
    sources = dims == 1 ? 1 : R;
    tables.emplace(tables_in, P, E, R);
    B = tables->batch;
    require_device(tables_in, "tables", loads_in, "loads");
    require(!batched || loads.size(0) == B, "loads must have one entry per layer (", B, "), got ",
            shape_text(loads));
  }

  // A new tensor [length] or [L, length]; [] or [L] without a length.
  Tensor per_layer(int64_t length, ScalarType dtype = ScalarType::Int) const {
    return batched ? new_empty(loads, {B, length}, dtype) : new_empty(loads, {length}, dtype);
  }
  Tensor per_layer(ScalarType dtype) const {
    return batched ? new_empty(loads, {B}, dtype) : new_empty(loads, {}, dtype);
  }
  void require_per_layer(const Tensor& tensor, const char* name, int64_t length) const {
    batched ? require_shape(tensor, name, {B, length}) : require_shape(tensor, name, {length});
  }

  Tensor checked_ticks(const Tensor& given) const {
    require_dtype(given, "ticks", ScalarType::Int);
    require_shape(given, "ticks", {R});
    require_device(given, "ticks", loads, "loads");
    const Tensor ticks = dense(given);
    for (int64_t r = 0; r < R && loads.is_cpu(); ++r) {
      const int32_t tick = data<int32_t>(ticks)[r];
      require(tick >= 1 && tick <= 1 << 20, "ticks must be in 1..2^20, got ", tick, " for rank ", r);
    }
    return ticks;
  }

  const int32_t* of(int64_t b) const { return data<int32_t>(loads) + b * sources * width; }

  // Raises what a planner refused in the loads of layer b: it only knows that something is wrong, and here
  // there is time to look.
  void explain(int64_t b, int64_t besides = 0, const char* what = "loads") const {
    const ReplicaTables t = tables->layer(b);
    int64_t copies = besides, lonely = -1;
    for (int64_t i = 0; i < sources * E; ++i) {
      const int64_t e = i % E, n = of(b)[i / E * width + e];
      require(n >= 0, "loads must not be negative, got ", n, " for expert ", e);
      if (n > 0 && t.copies(static_cast<int>(e)) == 0 && lonely < 0) lonely = e;
      copies += n;
    }
    require(copies <= INT32_MAX, what, " must sum to less than 2^31 copies, got ", copies);
    require(lonely < 0, "loads must be 0 for an expert without a replica, got copies for expert ", lonely);
  }

  Tensor loads;
  bool batched;
  int64_t R, P, E = 0, width = 0, B = 0, sources = 0;
  std::optional<Tables> tables;
};

}  // namespace isoload::ops
