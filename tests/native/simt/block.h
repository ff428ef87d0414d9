// The lanes of a block as fibers of one CPU thread, and where they meet.
//
// A lane runs until a barrier; then another one does, by order or, with a seed, drawn. A barrier opens when
// every lane that it names waits at it; if that never comes, the process ends with a finding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace simt {

constexpr int kMostLanes = 1024;

struct Index {
  unsigned x = 0;
};
Index thread_index();
Index block_index();
Index block_size();
Index grid_size();

// exchange: a shuffle, match or reduction of a warp.
enum class Meeting : uint8_t { none, block, warp, exchange };

// A barrier of the block, or of the lanes of this warp that are in mask.
void meet(Meeting meeting, unsigned mask);
bool meet_any(bool b);  // of the block: whether any lane has it

// What the lanes of this warp in mask give, [32]; others' words are of no meaning.
const uint64_t* exchange(unsigned mask, uint64_t word);

// Copies now, for a lane that waits for it later: see cuda_pipeline_primitives.h.
void copy_async(void* to, const void* from, std::size_t bytes);
void wait_for_copies();

// Of a kernel that starts before the one ahead of it has ended: see races.h.
void wait_for_kernel_ahead();
void let_next_kernel_start();

// Runs body(closure) in every lane of every block.
void run_grid(void* kernel, int64_t blocks, int lanes, int64_t shared_bytes, void (*body)(void*),
              void* closure);

// The order of lanes: drawn with this seed; 0: by number.
void set_seed(uint64_t seed);

// The running lane's call stack: return addresses, outermost first.
std::vector<void*>& calls();

}  // namespace simt
