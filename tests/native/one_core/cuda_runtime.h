// CUDA blocks on one CPU thread: what csrc/cuda uses of CUDA, with a fiber per lane.
//
// A block's lanes run one after the other, each up to its next barrier. So this sees wrong results and
// barriers that not every lane comes to (the process ends with a message), but no race.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#define __host__
#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)

struct Index {
  unsigned x = 0;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
template <class T>
cudaError_t cudaGetSymbolAddress(void** address, T& symbol) {
  return *address = &symbol, cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* p, int value, std::size_t bytes, cudaStream_t) {
  std::memset(p, value, bytes);
  return cudaSuccess;
}
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed };
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "refused"; }

namespace one_core {

// The lanes of the block that runs. A lane that waits says for what: 1 its warp, 2 the block.
class Block {
 public:
  void run(int lanes, const std::function<void()>& kernel) {
    kernel_ = &kernel;
    lanes_.resize(lanes);
    for (Lane& lane : lanes_) {
      if (!lane.stack) lane.stack = std::make_unique<char[]>(kStack);
      getcontext(&lane.context);
      lane.context.uc_stack.ss_sp = lane.stack.get();
      lane.context.uc_stack.ss_size = kStack;
      lane.context.uc_link = &main_;
      lane.waits = 0;
      lane.done = false;
      makecontext(&lane.context, &Block::enter, 0);
    }
    while (turn()) continue;
  }

  void wait(int what) {
    lanes_[threadIdx.x].waits = what;
    swapcontext(&lanes_[threadIdx.x].context, &main_);
  }

  // What the lanes of this warp hand each other between two warp barriers.
  uint64_t* exchange() { return exchange_[threadIdx.x / 32]; }
  static Block& here() {
    static Block block;
    return block;
  }

 private:
  static constexpr std::size_t kStack = 256 * 1024;
  struct Lane {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    int waits = 0;
    bool done = false;
  };

  static void enter() {
    (*here().kernel_)();
    here().lanes_[threadIdx.x].done = true;
  }

  // Every lane that may go on does, up to its next barrier; then barriers that all have reached open.
  bool turn() {
    bool ran = false;
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
      if (lanes_[i].done || lanes_[i].waits) continue;
      threadIdx.x = static_cast<unsigned>(i);
      swapcontext(&main_, &lanes_[i].context);
      ran = true;
    }
    bool opened = open(0, lanes_.size(), 2);
    for (std::size_t first = 0; first < lanes_.size(); first += 32) opened |= open(first, first + 32, 1);
    if (ran || opened) return true;
    for (const Lane& lane : lanes_)
      if (!lane.done) std::fprintf(stderr, "a barrier that not every lane comes to\n"), std::abort();
    return false;
  }

  // A lane that has left counts as arrived only if the whole group has left: CUDA promises no more.
  bool open(std::size_t first, std::size_t last, int what) {
    for (std::size_t i = first; i < last; ++i)
      if (lanes_[i].done || lanes_[i].waits != what) return false;
    for (std::size_t i = first; i < last; ++i) lanes_[i].waits = 0;
    return true;
  }

  const std::function<void()>* kernel_ = nullptr;
  ucontext_t main_;
  std::vector<Lane> lanes_;
  uint64_t exchange_[32][32];
};

// Every lane of the warp gives v; f of all 32.
template <class T, class F>
auto meet(T v, F&& f) {
  Block& block = Block::here();
  static_assert(sizeof(T) <= 8);
  uint64_t word = 0;
  std::memcpy(&word, &v, sizeof(T));
  block.exchange()[threadIdx.x % 32] = word;
  block.wait(1);
  T all[32];
  for (int i = 0; i < 32; ++i) std::memcpy(&all[i], &block.exchange()[i], sizeof(T));
  const auto result = f(all);
  block.wait(1);
  return result;
}

inline uint64_t shared_memory[128 * 1024 / 8];  // dynamic

// One block after the other. Their shared memory holds what the last owner left, so it is spoilt first.
template <class Kernel, class... Arguments>
void launch(Kernel kernel, int64_t blocks, int lanes, std::size_t shared_bytes,
            const Arguments&... arguments) {
  if (shared_bytes > sizeof(shared_memory)) std::fprintf(stderr, "too much shared memory\n"), std::abort();
  gridDim.x = static_cast<unsigned>(blocks), blockDim.x = lanes;
  for (int64_t b = 0; b < blocks; ++b) {
    blockIdx.x = static_cast<unsigned>(b);
    std::memset(shared_memory, 0xA5, sizeof(shared_memory));
    Block::here().run(lanes, [&] { kernel(arguments...); });
  }
}

}  // namespace one_core

inline void __syncthreads() { one_core::Block::here().wait(2); }
inline void __syncwarp() { one_core::Block::here().wait(1); }
template <class T>
T __shfl_sync(unsigned, T v, int from) {
  return one_core::meet(v, [&](const T* all) { return all[from]; });
}
template <class T>
T __shfl_xor_sync(unsigned, T v, int mask) {
  return one_core::meet(v, [&](const T* all) { return all[(threadIdx.x % 32) ^ mask]; });
}
template <class T>
T __shfl_up_sync(unsigned, T v, int by) {
  const int lane = threadIdx.x % 32;
  return one_core::meet(v, [&](const T* all) { return all[lane < by ? lane : lane - by]; });
}
template <class T>
T __reduce_max_sync(unsigned, T v) {
  return one_core::meet(v, [](const T* all) { return *std::max_element(all, all + 32); });
}
inline unsigned __reduce_or_sync(unsigned, unsigned v) {
  return one_core::meet(v, [](const unsigned* all) {
    unsigned any = 0;
    for (int i = 0; i < 32; ++i) any |= all[i];
    return any;
  });
}
inline unsigned __match_any_sync(unsigned, int v) {
  return one_core::meet(v, [&](const int* all) {
    unsigned same = 0;
    for (int i = 0; i < 32; ++i) same |= unsigned(all[i] == v) << i;
    return same;
  });
}
inline int atomicAdd(int* p, int v) { return std::exchange(*p, *p + v); }
inline int atomicOr(int* p, int v) { return std::exchange(*p, *p | v); }
inline int atomicExch(int* p, int v) { return std::exchange(*p, v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(uint64_t v) { return __builtin_popcountll(v); }
