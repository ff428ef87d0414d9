// balance_own on one core: ids [n] to counts [E] and slots [n] by plan_own. in: of the counts, which need not
// be there yet.
#pragma once

#include "cpu/counted_deal.h"
#include "cpu/cpu.h"
#include "cpu/planner.h"

namespace isoload::cpu {

template <class Id>
BalanceFault balance_own(const Id* ids, int64_t n, OwnProblem in, int32_t* counts, Id* slots) {
  CountedDeal deal(in.tables, in.E);
  if (const int64_t bad = deal.count(ids, n, counts); bad != -1) return {BalanceFault::bad_id, bad};
  thread_local std::vector<int32_t> send;
  send.resize(int64_t(in.R) * in.S);
  in.loads = counts;
  if (plan<OwnPlanner>(in, send.data(), 0) != kPlanned) return {BalanceFault::not_planned};
  deal.deal(ids, n, send.data(), slots);
  return {};
}

}  // namespace isoload::cpu
