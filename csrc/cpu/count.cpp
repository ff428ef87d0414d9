#include "cpu/cpu.h"

namespace isoload::cpu {

template <class Id>
int64_t count(const Id* ids, int64_t n, int E, int32_t* counts) {
  for (int e = 0; e < E; ++e) counts[e] = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Id id = ids[i];
    if (static_cast<uint64_t>(id) < static_cast<uint64_t>(E)) {
      ++counts[id];
    } else if (id != -1) {
      return id;
    }
  }
  return -1;
}

template int64_t count(const int32_t*, int64_t, int, int32_t*);
template int64_t count(const int64_t*, int64_t, int, int32_t*);

}  // namespace isoload::cpu
