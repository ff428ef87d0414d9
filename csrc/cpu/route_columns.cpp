#include "cpu/cpu.h"

namespace isoload::cpu {

template <class Id>
ColumnsFault route_columns(const Id* ids, int E, const ReplicaTables& tables, const Numbered& numbered,
                           const SharedRoute& shared, const int32_t* source_quota, Id* slots) {
  const RouteFault fault =
      route_numbered(ids, shared.T, shared.K, E, tables, numbered, columns_of(shared), source_quota, slots);
  if (fault.kind != RouteFault::none || shared.source_quota == nullptr) return {fault, {}};
  return {fault, route_shared(shared, slots, slots + shared.K)};
}

template ColumnsFault route_columns(const int32_t*, int, const ReplicaTables&, const Numbered&,
                                    const SharedRoute&, const int32_t*, int32_t*);
template ColumnsFault route_columns(const int64_t*, int, const ReplicaTables&, const Numbered&,
                                    const SharedRoute&, const int32_t*, int64_t*);

}  // namespace isoload::cpu
