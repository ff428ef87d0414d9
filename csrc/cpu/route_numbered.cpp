#include <vector>

#include "cpu/cpu.h"
#include "cpu/dealer.h"

namespace isoload::cpu {

// The copies come in order, so their numbers say nothing new here: they are compared.
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
    for (int64_t t = first; t < T && t < first + kPartRows; ++t) {
      const int64_t row = t * (K + shared.n);
      bool present = false;
      for (int64_t i = row; i < row + K; ++i) {
        const Id id = ids[i];
        slots[i] = -1;
        if (id == -1) continue;
        if (!is_expert(id, E)) return {RouteFault::bad_id, id};
        if (numbered.numbers[i] != met[id]++) return {RouteFault::not_the_numbers, id};
        slots[i] = dealer.deal(static_cast<int>(id));
        if (slots[i] < 0) return {RouteFault::not_the_share, id};
        present = true;
      }
      for (int j = 0; j < shared.n; ++j) {
        if (ids[row + K + j] != (present ? E + j : -1)) return {RouteFault::not_shared, t};
        slots[row + K + j] = present && shared.home_slot >= 0 ? shared.home_slot + j : -1;
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
