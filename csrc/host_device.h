// ISOLOAD_HD marks what a CUDA block runs too; a C++ compiler sees nothing. ISOLOAD_ROLLED stands before a
// loop of few or long turns, which nvcc would write out: a GPU's instruction cache shall hold the kernel.
// ISOLOAD_UNROLLED(n) stands before one that nvcc shall write out n times, ISOLOAD_BY_FOUR before one of many
// short turns, which g++ would not write out either. ISOLOAD_ONCE marks a rare function of several callers.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define ISOLOAD_HD __host__ __device__
#define ISOLOAD_ROLLED _Pragma("unroll 1")
#define ISOLOAD_ALIGNED(bytes) alignas(bytes)  // for wide loads; a workspace is aligned to 16
#define ISOLOAD_PRAGMA(text) _Pragma(#text)
#define ISOLOAD_UNROLLED(n) ISOLOAD_PRAGMA(unroll n)
#define ISOLOAD_BY_FOUR _Pragma("unroll 4")
#define ISOLOAD_COLD  // on a GPU a call would force the caller's registers into memory
#define ISOLOAD_ONCE __attribute__((noinline))
#else
#define ISOLOAD_HD
#define ISOLOAD_COLD [[gnu::noinline]]
#define ISOLOAD_ONCE
#define ISOLOAD_ROLLED
#define ISOLOAD_ALIGNED(bytes)
#define ISOLOAD_UNROLLED(n)
#define ISOLOAD_BY_FOUR _Pragma("GCC unroll 4")
#endif

namespace isoload {

// Tells nvcc that p, or null, leads to a GPU's global memory, where it does not see a kernel's argument in
// it.
ISOLOAD_HD inline void lies_in_global(const void* p) {
#ifdef __CUDA_ARCH__
  __builtin_assume(__isGlobal(p));
#endif
}

// The index of the lowest 1 of a word that has one.
ISOLOAD_HD inline int lowest_one(uint64_t word) {
#ifdef __CUDA_ARCH__
  return __ffsll(static_cast<long long>(word)) - 1;
#else
  return __builtin_ctzll(word);
#endif
}

ISOLOAD_HD inline int lowest_one(uint32_t word) {
#ifdef __CUDA_ARCH__
  return __ffs(static_cast<int>(word)) - 1;
#else
  return __builtin_ctz(word);
#endif
}

ISOLOAD_HD inline int count_ones(uint32_t word) {
#ifdef __CUDA_ARCH__
  return __popc(word);
#else
  return __builtin_popcount(word);
#endif
}
ISOLOAD_HD inline int count_ones(uint64_t word) {
#ifdef __CUDA_ARCH__
  return __popcll(word);
#else
  return __builtin_popcountll(word);
#endif
}

}  // namespace isoload
