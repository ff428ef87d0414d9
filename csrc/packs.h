// Values that lie next to each other, 16 bytes at a time: a GPU's lane then waits for one load, not for four.
#pragma once

#include "host_device.h"

namespace isoload {

template <class Real>
struct Pack {
  static constexpr int kSize = 16 / sizeof(Real);
#ifdef __CUDACC__
  struct alignas(16) Values {
    Real value[kSize];
    ISOLOAD_HD Real operator[](int i) const { return value[i]; }
  };
#else
  typedef Real Values __attribute__((vector_size(16), may_alias));
#endif
};

// to[i] = from[i]; from lies at a multiple of 16 bytes.
template <int n, class Real>
ISOLOAD_HD void load(const Real* from, Real (&to)[n]) {
  using Values = typename Pack<Real>::Values;
  constexpr int kSize = Pack<Real>::kSize;
  static_assert(n % kSize == 0, "whole packs");
  for (int p = 0; p < n / kSize; ++p) {
    const Values values = reinterpret_cast<const Values*>(from)[p];
    for (int i = 0; i < kSize; ++i) to[p * kSize + i] = values[i];
  }
}

}  // namespace isoload
