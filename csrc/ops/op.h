// What the file of an op includes: checks, new tensors, where it runs; and ISOLOAD_OP.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>

#include "check.h"
#include "ops/device.h"
#include "ops/list.h"
#include "ops/tables.h"
#include "ops/tensors.h"

// Makes the function isoload::ops::name the op of that name in ops/list.h. After it, outside of namespaces.
#define ISOLOAD_OP(name)                                                         \
  namespace isoload::boxed {                                                     \
  void name(StableIValue* stack, uint64_t num_arguments, uint64_t num_results) { \
    TORCH_BOX (&isoload::ops::name)(stack, num_arguments, num_results);          \
  }                                                                              \
  }
