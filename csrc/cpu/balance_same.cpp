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

template BalanceFault balance_same(const int32_t*, int64_t, const ExactProblem&, int32_t*, const ExactResult&,
                                   int32_t*);
template BalanceFault balance_same(const int64_t*, int64_t, const ExactProblem&, int32_t*, const ExactResult&,
                                   int64_t*);

}  // namespace isoload::cpu
