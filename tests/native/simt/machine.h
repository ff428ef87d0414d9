// A CUDA grid without a GPU: what its parts share.
//
// The kernels of csrc/cuda are compiled for the CPU with -fsanitize=thread, and linked with this run-time in
// the place of ThreadSanitizer's. Blocks run one after the other; a block's lanes are fibers of one thread
// (block.h). Every load and store arrives here with its address (hooks.cpp), every barrier with the lanes
// that it joins, and races.h orders the accesses of different lanes.
//
// It models: __syncthreads and __syncwarp with its mask as all that orders lanes; shuffles and their like,
// which hand over values and order nothing; atomics of the block's and the grid's memory; asynchronous copies
// that arrive when they are waited for; the launches of one stream, each ordered after the last, an early one
// behind its wait alone. It cannot see: memory orders of atomics and fences (there are none in csrc), two
// streams, reads of global memory that nobody wrote or that does not exist, an overrun from one static
// __shared__ variable into the next, what memcpy touches, lanes of a warp that come to one barrier from
// different branches, and anything nvcc makes of the code.
#pragma once

#include <cstddef>
#include <cstdint>

namespace simt {

// As large as a block's shared memory may be on any GPU; guards on both sides catch what lies beyond.
constexpr int64_t kMostShared = 227 * 1024;
struct SharedArena {
  alignas(16) unsigned char before[16 * 1024];
  alignas(16) uint64_t data[kMostShared / 8];
  alignas(16) unsigned char after[16 * 1024];
};
extern SharedArena shared_arena;

// own: the lanes' stacks, the host's, and what this run-time keeps; no other lane has the address.
enum class Space { own, shared, global };

struct Access {
  uintptr_t address;
  std::size_t bytes;
  bool write, atomic;
  void* pc;  // behind the instruction
};

struct Machine {
  int lane = -1;  // that runs; -1: the host does
  int block = 0, lanes = 0;
  void* kernel = nullptr;
  int64_t blocks = 0, shared_bytes = 0;
  int64_t shared_limit = kMostShared;  // of this GPU
  int64_t most_shared_bytes = 0;       // that a launch has asked for
  uint64_t launches = 0, early_launches = 0, memsets = 0;
  bool early = false;  // the kernel ahead may still run
  bool find_races = true, note_barriers = false;
  uintptr_t lanes_begin = 0, lanes_end = 0;    // their stacks
  uintptr_t host_begin = 0, host_end = 0;      // the host's stack: kernel arguments
  uintptr_t static_begin = 0, static_end = 0;  // static __shared__ variables
};
extern Machine machine;

Space space_of(uintptr_t address);

// Every load and store of a lane, and every atomic.
void on_access(const Access& access);
int atomic_add(int* p, int v);
int atomic_or(int* p, int v);
int atomic_exchange(int* p, int v);

}  // namespace simt
