// Small kernels, right and wrong, that show what the run-time sees: tests/ops/test_simt.py.
#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>

#include <cstring>
#include <functional>
#include <map>
#include <string>

namespace {

constexpr int kLanes = 64;
int32_t global[4096];
int32_t sinks[2][kLanes];

int32_t* sink() { return sinks[blockIdx.x]; }
int32_t* dynamic() { return reinterpret_cast<int32_t*>(simt::shared_arena.data); }

// Every lane reads what its neighbour wrote; `order` stands between.
template <class Order>
void neighbours(int32_t* shared, Order&& order) {
  const int me = threadIdx.x;
  shared[me] = me;
  order();
  sink()[me] = shared[(me + 1) % kLanes];
}

// Inside a warp only.
template <class Order>
void warp_neighbours(int32_t* shared, Order&& order) {
  const int me = threadIdx.x, next = me / 32 * 32 + (me + 1) % 32;
  shared[me] = me;
  order();
  sink()[me] = shared[next];
}

void block_barrier() {
  neighbours(dynamic(), [] { __syncthreads(); });
}
void no_barrier() {
  neighbours(dynamic(), [] {});
}
void a_warp_barrier_between_warps() {
  neighbours(dynamic(), [] { __syncwarp(); });
}
void a_static_array() {
  __shared__ int32_t shared[kLanes];
  neighbours(shared, [] {});
}
template <int kSize>
void blocks_have_their_own_static() {
  __shared__ int32_t shared[kSize];
  neighbours(shared, [] { __syncthreads(); });
  __syncthreads();
}
void global_memory() {
  neighbours(global, [] {});
}
void warp_barrier() {
  warp_neighbours(dynamic(), [] { __syncwarp(); });
}
void a_shuffle_orders_nothing() {
  warp_neighbours(dynamic(), [] { __shfl_sync(~0u, 1, 0); });
}

// Each half of a warp waits for itself; lanes 15 and 31 read from the other half.
void half_a_warp_each() {
  warp_neighbours(dynamic(), [] { __syncwarp(threadIdx.x % 32 < 16 ? 0xffffu : 0xffff0000u); });
}
// Lane 0 writes, meets 1; 1 meets 2; 2 reads: ordered by way of 1.
void a_chain_of_masks() {
  const int me = threadIdx.x;
  if (me == 0) dynamic()[0] = 7;
  if (me < 2) __syncwarp(3u);
  if (me == 1 || me == 2) __syncwarp(6u);
  if (me == 2) sink()[0] = dynamic()[0];
}
void a_broken_chain() {
  const int me = threadIdx.x;
  if (me == 1 || me == 2) __syncwarp(6u);
  if (me == 0) dynamic()[0] = 7;
  if (me < 2) __syncwarp(3u);
  if (me == 2) sink()[0] = dynamic()[0];
}

void a_write_after_reads() {
  const int me = threadIdx.x;
  dynamic()[me] = me;
  __syncthreads();
  sink()[me] = dynamic()[5];
  if (me == 40) dynamic()[5] = 1;
}
void blocks_write_their_own() { global[blockIdx.x * kLanes + threadIdx.x] = 1; }
void blocks_write_the_same() {
  if (threadIdx.x == 0) global[0] = 1;
}
void blocks_add_to_the_same() { atomicAdd(&global[0], 1); }
void an_atomic_beside_a_read() {
  atomicAdd(&global[0], 1);
  sink()[threadIdx.x] = global[0];
}
void bytes_of_one_word() { reinterpret_cast<char*>(global)[blockIdx.x * kLanes + threadIdx.x] = 1; }
void a_byte_of_a_word() {
  if (threadIdx.x == 1) global[0] = 1;
  if (threadIdx.x == 33) reinterpret_cast<char*>(global)[3] = 1;
}

void uninitialised() { sink()[threadIdx.x] = dynamic()[threadIdx.x]; }
void uninitialised_static() {
  __shared__ int32_t shared[kLanes];
  if (threadIdx.x > 0) shared[threadIdx.x] = 1;
  sink()[threadIdx.x] = shared[threadIdx.x];
}
void beyond() { dynamic()[threadIdx.x + 1] = 1; }
void before() {
  if (threadIdx.x == 0) dynamic()[-1] = 1;
}

void copy(bool wait) {
  const int me = threadIdx.x;
  __pipeline_memcpy_async(&dynamic()[me], &global[me], sizeof(int32_t));
  __pipeline_commit();
  if (wait) __pipeline_wait_prior(0);
  __syncthreads();
  sink()[me] = dynamic()[(me + 1) % kLanes];
}
void a_copy_waited_for() { copy(true); }
void a_copy_not_waited_for() { copy(false); }

void a_lane_leaves() {
  if (threadIdx.x == 3) return;
  __syncthreads();
}
void a_foreign_mask() { __syncwarp(1u); }

// Each starts early.
void an_early_start() {
  dynamic()[threadIdx.x] = 1;  // of its own: nothing to wait for
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  sink()[threadIdx.x] = dynamic()[threadIdx.x];
}
void an_early_read() {
  const int32_t value = global[threadIdx.x];
  cudaGridDependencySynchronize();
  sink()[threadIdx.x] = value;
}
void an_early_write() {
  sink()[threadIdx.x] = 1;
  cudaGridDependencySynchronize();
}
void an_early_copy() {
  __pipeline_memcpy_async(&dynamic()[threadIdx.x], &global[threadIdx.x], sizeof(int32_t));
  cudaGridDependencySynchronize();
  __pipeline_commit();
  __pipeline_wait_prior(0);
}
void an_early_atomic() {
  atomicAdd(&global[0], 1);
  cudaGridDependencySynchronize();
}
void the_next_before_the_wait() {
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
}
void a_block_that_never_waits() {
  if (blockIdx.x > 0) cudaGridDependencySynchronize();
}

// What every lane is worth to the warp.
void warp_values() {
  const int me = threadIdx.x % 32, warp = threadIdx.x / 32;
  int wrong = __shfl_sync(~0u, me + 100 * warp, 7) != 7 + 100 * warp;
  wrong += __shfl_xor_sync(~0u, me, 5) != (me ^ 5);
  wrong += __shfl_up_sync(~0u, me, 3) != (me < 3 ? me : me - 3);
  wrong += __reduce_max_sync(~0u, me * (me % 2)) != 31;
  wrong += __reduce_or_sync(~0u, 1u << me) != ~0u;
  wrong += __match_any_sync(~0u, me % 4) != 0x11111111u << me % 4;
  wrong += (me < 8 ? __reduce_max_sync(0xffu, me) : 7) != 7;
  sink()[threadIdx.x] = wrong;
}

// Each in one call of each lane: for the order that lanes run in.
void order_of_lanes() { global[atomicAdd(&sink()[0], 1)] = threadIdx.x; }

const std::map<std::string, void (*)()> kProbes = {
#define PROBE(name) {#name, name}
    PROBE(block_barrier),
    PROBE(no_barrier),
    PROBE(a_warp_barrier_between_warps),
    PROBE(a_static_array),
    PROBE(blocks_have_their_own_static<kLanes>),
    PROBE(global_memory),
    PROBE(warp_barrier),
    PROBE(a_shuffle_orders_nothing),
    PROBE(half_a_warp_each),
    PROBE(a_chain_of_masks),
    PROBE(a_broken_chain),
    PROBE(a_write_after_reads),
    PROBE(blocks_write_their_own),
    PROBE(blocks_write_the_same),
    PROBE(blocks_add_to_the_same),
    PROBE(an_atomic_beside_a_read),
    PROBE(bytes_of_one_word),
    PROBE(a_byte_of_a_word),
    PROBE(uninitialised),
    PROBE(uninitialised_static),
    PROBE(beyond),
    PROBE(before),
    PROBE(a_copy_waited_for),
    PROBE(a_copy_not_waited_for),
    PROBE(a_lane_leaves),
    PROBE(a_foreign_mask),
    PROBE(warp_values),
    PROBE(order_of_lanes),
};
const std::map<std::string, void (*)()> kEarlyProbes = {
    PROBE(an_early_start),           PROBE(an_early_read),
    PROBE(an_early_write),           PROBE(an_early_copy),
    PROBE(an_early_atomic),          PROBE(the_next_before_the_wait),
    PROBE(a_block_that_never_waits),
};

}  // namespace

extern "C" {
// Runs a probe; false if there is none of this name. result: [kLanes] of sink; order: [kLanes] of global.
bool probe(const char* name, int64_t blocks, bool early, int32_t* result, int32_t* order) {
  const auto& probes = early ? kEarlyProbes : kProbes;
  const auto found = probes.find(name);
  if (found == probes.end()) return false;
  std::memset(sinks, 0, sizeof sinks);
  std::memset(global, 0, sizeof global);
  cudaLaunchAttribute attribute{cudaLaunchAttributeProgrammaticStreamSerialization, {1}};
  const cudaLaunchConfig_t config{
      static_cast<unsigned>(blocks), kLanes, kLanes * sizeof(int32_t), nullptr, &attribute, early};
  cudaLaunchKernelEx(&config, found->second);
  std::memcpy(result, sinks[0], sizeof sinks[0]);
  std::memcpy(order, global, sizeof sinks[0]);
  return true;
}
}
