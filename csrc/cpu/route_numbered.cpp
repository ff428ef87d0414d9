#include <algorithm>
#include <vector>

#include "cpu/cpu.h"
#include "cpu/dealer.h"

namespace isoload::cpu {

// Copies [n] that lie side by side come in order, so their numbers say nothing new here: they are compared.
template <class Id>
RouteFault deal(const Id* ids, const int32_t* numbers, int64_t n, int E, Dealer& dealer,
                std::vector<int32_t>& met, Id* slots) {
  for (int64_t i = 0; i < n; ++i) {
    const Id id = ids[i];
    slots[i] = -1;
    if (id == -1) continue;
    if (!is_expert(id, E)) return {RouteFault::bad_id, id};
    if (numbers[i] != met[id]++) return {RouteFault::not_the_numbers, id};
    slots[i] = dealer.deal(static_cast<int>(id));
    if (slots[i] < 0) return {RouteFault::not_the_share, id};
  }
  return {};
}

template <class Id>
RouteFault route_numbered(const Id* ids, int64_t T, int K, int E, const ReplicaTables& tables,
                          const Numbered& numbered, const SharedColumns& shared, const int32_t* source_quota,
                          Id* slots) {
  thread_local Dealer dealer;
  thread_local std::vector<int32_t> met;  // [E] copies so far in this part
  dealer.reset(tables, E, source_quota);
  const int32_t* part = numbered.parts;
  for (int64_t first = 0; first < T; first += kPartRows, part += numbered.stride) {
    met.assign(E, 0);
    const int64_t rows = first + kPartRows < T ? kPartRows : T - first, width = K + shared.n;
    const int64_t run = shared.n == 0 ? rows * K : K, end = (first + rows) * width;
    for (int64_t at = first * width; at < end; at += run + shared.n) {
      const RouteFault fault = deal(ids + at, numbered.numbers + at, run, E, dealer, met, slots + at);
      if (fault.kind != RouteFault::none) return fault;
      const bool present = std::any_of(slots + at, slots + at + run, [](Id slot) { return slot >= 0; });
      for (int j = 0; j < shared.n; ++j) {
        const int64_t i = at + K + j;
        if (ids[i] != (present ? E + j : -1)) return {RouteFault::not_shared, at / width};
        slots[i] = present && shared.home_slot >= 0 ? shared.home_slot + j : -1;
      }
    }
    for (int e = 0; e < E; ++e)
      if (part[e] != met[e]) return {RouteFault::not_the_numbers, e};
  }
  if (const int e = dealer.undealt(); e >= 0) return {RouteFault::not_the_share, e};
  return {};
}

template RouteFault route_numbered(const int32_t*, int64_t, int, int, const ReplicaTables&, const Numbered&,
                                   const SharedColumns&, const int32_t*, int32_t*);
template RouteFault route_numbered(const int64_t*, int64_t, int, int, const ReplicaTables&, const Numbered&,
                                   const SharedColumns&, const int32_t*, int64_t*);

}  // namespace isoload::cpu
