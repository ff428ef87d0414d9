// The loads and tables of a batch of layers, checked: what all that split loads begin with.
#pragma once

#include "ops/plan_layers.h"
#include "ops/tables.h"

namespace isoload::ops {

struct LoadsBatch : Layers {
  // num_shared: columns of shared experts behind those of the tables' E. by_source: loads may be so.
  LoadsBatch(const Tensor& loads, const Tensor& tables_in, int64_t num_ranks, int64_t num_slots,
             int64_t num_shared = 0, const char* name = "loads", bool by_source = true)
      : Layers{dense(loads), name, tables_in.dim() == 2, 1}, R(num_ranks), P(num_slots) {
    require_dtype(loads, name, ScalarType::Int);
    require_in("num_ranks", R, 1, kMaxRanks);
    require(P >= R && P % R == 0, "num_slots must be a multiple of num_ranks=", R, ", got ", P);
    const int64_t dims = loads.dim() - batched;
    if (by_source)
      require(dims == 1 || (dims == 2 && loads.size(batched) == R), name, " must be [E] or [", R,
              ", E] per layer, got ", shape_text(loads));
    else
      require(dims == 1, name, " must be [E] per layer, got ", shape_text(loads));
    width = loads.size(loads.dim() - 1), E = width - num_shared;
    sources = dims == 1 ? 1 : R;
    tables.emplace(tables_in, P, E, R);
    B = tables->batch;
    require_device(tables_in, "tables", loads, name);
    require(!batched || loads.size(0) == B, name, " must have one entry per layer (", B, "), got ",
            shape_text(loads));
  }

  // What every problem of this kind has, of layer 0.
  template <class Problem>
  Problem problem() const {
    Problem problem{};
    static_cast<SplitProblem&>(problem) = {
        static_cast<int>(R),      static_cast<int>(E), static_cast<int>(P / R), tables->layer(0), of(0),
        static_cast<int>(sources)};
    return problem;
  }

  const int32_t* of(int64_t b) const { return data<int32_t>(like) + b * sources * width; }

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

  int64_t R, P, E = 0, width = 0, sources = 0;
  std::optional<Tables> tables;
};

}  // namespace isoload::ops
