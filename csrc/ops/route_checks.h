// What the routes check alike.
#pragma once

#include "cpu/cpu.h"
#include "ops/op.h"

namespace isoload::ops {

inline void require_copies(const Tensor& topk_ids) {
  require_columns(topk_ids, "topk_ids");
  require(topk_ids.numel() <= INT32_MAX, "topk_ids must have fewer than 2^31 entries, got ",
          topk_ids.numel());
}

// What counts [E] made of ids and their planner found wrong.
inline void check_balance(const cpu::BalanceFault& fault, const SplitProblem& in, const int32_t* counts) {
  require(fault.kind != cpu::BalanceFault::bad_id, "topk_ids must be in -1..", in.E - 1, ", got ",
          fault.value);
  for (int e = 0; fault.kind != cpu::BalanceFault::none && e < in.E; ++e)
    require(counts[e] == 0 || in.tables.copies(e) > 0, "topk_ids must be of experts with a replica, got ", e);
}

inline void check_shared(const cpu::SharedFault& fault, const cpu::SharedRoute& problem) {
  require(fault.kind != cpu::SharedFault::bad_slot, "slots must be in -1..",
          int64_t(problem.R) * problem.S - 1, ", got ", fault.value);
  if (fault.kind == cpu::SharedFault::none) return;
  int64_t sum = 0;
  for (int64_t d = 0; d < problem.R; ++d) sum += problem.source_quota[d];
  require(false, "source_quota must sum to num_shared copies of every token with a slot, ", fault.value,
          ", got ", sum);
}

inline void require_copies_of_ranks(const Tensor& source_quota) {
  for (int64_t d = 0; d < source_quota.size(0); ++d) {
    const int32_t copies = data<int32_t>(source_quota)[d];
    require(copies >= 0, "source_quota must not be negative, got ", copies, " for rank ", d);
  }
}

}  // namespace isoload::ops
