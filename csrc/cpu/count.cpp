#include "cpu/cpu.h"

namespace isoload::cpu {
namespace {

// each(i, expert) for every copy that is not masked. Returns the first id outside [-1, E), or -1.
template <class Id, class Each>
int64_t for_copies(const Id* ids, int64_t begin, int64_t end, int E, Each&& each) {
  for (int64_t i = begin; i < end; ++i) {
    const Id id = ids[i];
    if (static_cast<uint64_t>(id) < static_cast<uint64_t>(E)) {
      each(i, id);
    } else if (id != -1) {
      return id;
    }
  }
  return -1;
}

}  // namespace

template <class Id>
int64_t count(const Id* ids, int64_t n, int E, int32_t* counts) {
  for (int e = 0; e < E; ++e) counts[e] = 0;
  return for_copies(ids, 0, n, E, [&](int64_t, Id e) { ++counts[e]; });
}

template <class Id>
int64_t count_numbered(const Id* ids, int64_t T, int K, int E, int32_t* counts, int32_t* numbers,
                       int32_t* parts) {
  for (int e = 0; e < E; ++e) counts[e] = 0;
  for (int64_t first = 0; first < T; first += kPartRows, parts += E) {
    const int64_t begin = first * K, end = (first + kPartRows < T ? first + kPartRows : T) * K;
    for (int e = 0; e < E; ++e) parts[e] = 0;
    for (int64_t i = begin; i < end; ++i) numbers[i] = -1;
    const int64_t bad = for_copies(ids, begin, end, E, [&](int64_t i, Id e) { numbers[i] = parts[e]++; });
    if (bad != -1) return bad;
    for (int e = 0; e < E; ++e) counts[e] += parts[e];
  }
  return -1;
}

template <class Id>
int64_t count_columns(const Id* ids, int64_t T, int K, int num_routed, int num_shared, Id* columns,
                      int32_t* counts, int32_t* numbers, int32_t* parts) {
  Id* out = columns;
  for (int64_t t = 0; t < T; ++t, ids += K) {
    bool any = false;
    for (int k = 0; k < K; ++k) {
      if (ids[k] >= num_routed) return ids[k];
      any |= ids[k] >= 0;
      *out++ = ids[k];
    }
    for (int j = 0; j < num_shared; ++j) *out++ = any ? static_cast<Id>(num_routed + j) : Id(-1);
  }
  return count_numbered(columns, T, K + num_shared, num_routed + num_shared, counts, numbers, parts);
}

template int64_t count(const int32_t*, int64_t, int, int32_t*);
template int64_t count(const int64_t*, int64_t, int, int32_t*);
template int64_t count_numbered(const int32_t*, int64_t, int, int, int32_t*, int32_t*, int32_t*);
template int64_t count_numbered(const int64_t*, int64_t, int, int, int32_t*, int32_t*, int32_t*);
template int64_t count_columns(const int32_t*, int64_t, int, int, int, int32_t*, int32_t*, int32_t*,
                               int32_t*);
template int64_t count_columns(const int64_t*, int64_t, int, int, int, int64_t*, int32_t*, int32_t*,
                               int32_t*);

}  // namespace isoload::cpu
