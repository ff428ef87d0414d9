// Words that processes or GPUs hand to one another through memory, and a clock for how long they wait.
#pragma once

#include <sched.h>
#include <time.h>

#include <cstdint>

#include "host_device.h"

namespace isoload {

// Whoever reads the word with load_acquire sees all that was written before it, anywhere in the system.
ISOLOAD_HD inline void store_release(uint32_t* word, uint32_t value) {
#ifdef __CUDA_ARCH__
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
#else
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
#endif
}

ISOLOAD_HD inline uint32_t load_acquire(const uint32_t* word) {
#ifdef __CUDA_ARCH__
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
#else
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
#endif
}

// Of a clock that never goes back.
ISOLOAD_HD inline int64_t nanoseconds() {
#ifdef __CUDA_ARCH__
  int64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
#else
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
#endif
}

// Lets others run, where the one that is waited for may need this core.
ISOLOAD_HD inline void pause() {
#ifndef __CUDA_ARCH__
  sched_yield();
#endif
}

}  // namespace isoload
