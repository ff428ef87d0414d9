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
  in.counts = counts;
  if (plan<OwnPlanner>(in, send.data(), 0) != kPlanned) return {BalanceFault::not_planned};
  deal.deal(ids, n, send.data(), slots);
  return {};
}

template BalanceFault balance_own(const int32_t*, int64_t, OwnProblem, int32_t*, int32_t*);
template BalanceFault balance_own(const int64_t*, int64_t, OwnProblem, int32_t*, int64_t*);

}  // namespace isoload::cpu
