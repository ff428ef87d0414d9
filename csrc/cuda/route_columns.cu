// route_columns: the look-up of route_numbered writes what has one place; copies that are dealt over the
// ranks follow in the kernel of route_shared, once all their tokens' routed copies have slots.
#include "cuda/cuda.h"

namespace isoload::cuda {

int64_t route_columns_bytes(const SharedRoute& shared) {
  return shared.source_quota == nullptr ? 0 : route_shared_bytes(shared);
}

template <class Id>
const char* route_columns(const Id* ids, int E, const ReplicaTables& tables, const Numbered& numbered,
                          const SharedRoute& shared, const int32_t* source_quota, Id* slots, void* global,
                          void* stream) {
  const char* const error = route_numbered(ids, shared.T, shared.K, E, shared.R * shared.S, tables, numbered,
                                           cpu::columns_of(shared), source_quota, slots, stream);
  if (error || shared.source_quota == nullptr) return error;
  return route_shared(shared, slots, slots + shared.K, global, stream);
}

template const char* route_columns(const int32_t*, int, const ReplicaTables&, const Numbered&,
                                   const SharedRoute&, const int32_t*, int32_t*, void*, void*);
template const char* route_columns(const int64_t*, int, const ReplicaTables&, const Numbered&,
                                   const SharedRoute&, const int32_t*, int64_t*, void*, void*);

}  // namespace isoload::cuda
