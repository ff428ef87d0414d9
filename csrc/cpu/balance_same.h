// balance_same on one core: ids [n] to loads [R, E], those of rank 0 and of the others, which have none, and
// slots [n] by plan_exact. in: of the loads, which need not be there yet.
#pragma once

#include <algorithm>

#include "cpu/counted_deal.h"
#include "cpu/cpu.h"
#include "cpu/planner.h"

namespace isoload::cpu {

// All copies are of one source, so its share of the quota is the quota.
template <class Id>
BalanceFault balance_same(const Id* ids, int64_t n, const ExactProblem& in, int32_t* loads,
                          const ExactResult& out, Id* slots) {
  CountedDeal deal(in.tables, in.E);
  if (const int64_t bad = deal.count(ids, n, loads); bad != -1) return {BalanceFault::bad_id, bad};
  std::fill(loads + in.E, loads + int64_t(in.R) * in.E, 0);
  if (plan<ExactPlanner>(in, out, 0) != kPlanned) return {BalanceFault::not_planned};
  deal.deal(ids, n, out.quota, slots);
  return {};
}

}  // namespace isoload::cpu
