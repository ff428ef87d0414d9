// The index of the library: what csrc/ops/list.h names is defined and registered here.
#include <torch/csrc/stable/library.h>

#include "ops/list.h"

namespace isoload {

namespace boxed {
#define ISOLOAD_DECLARE(name, schema) void name(StableIValue*, uint64_t, uint64_t);
ISOLOAD_OPS(ISOLOAD_DECLARE)
}  // namespace boxed

#define ISOLOAD_DEFINE(name, schema) m.def(#name schema);
#define ISOLOAD_IMPLEMENT(name, schema) m.impl(#name, boxed::name);

// clang-format off
STABLE_TORCH_LIBRARY(isoload, m) { ISOLOAD_OPS(ISOLOAD_DEFINE) }
STABLE_TORCH_LIBRARY_IMPL(isoload, CPU, m) { ISOLOAD_OPS(ISOLOAD_IMPLEMENT) }
#ifdef ISOLOAD_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(isoload, CUDA, m) { ISOLOAD_OPS(ISOLOAD_IMPLEMENT) }
#endif
// clang-format on

}  // namespace isoload

// The rules of the device's error word, a line each, for python/isoload/ops/library.py.
extern "C" [[gnu::visibility("default")]] const char* isoload_fault_rules() {
#define ISOLOAD_LINE(bit, rule) rule "\n"
  return ISOLOAD_FAULTS(ISOLOAD_LINE);
}
