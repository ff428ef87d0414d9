// A model of what a launch's critical path costs on an H100, in cycles. Good to about a factor of two, for
// comparing two versions of a kernel and for seeing which lines are on the path; never a figure to quote.
//
// Counted: loads and atomics by where they hit (shared memory, L1, L2), stores, barriers, shuffles. A load
// right after loads is taken to overlap with them; a store, an atomic or a barrier between ends that. high:
// no load overlaps. Not counted: the launch, arithmetic (divisions!) but for a few cycles per access, the
// instruction cache, bank conflicts, DRAM, and that blocks share a multiprocessor: the slowest block is the
// launch.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_set>
#include <vector>

#include "block.h"
#include "machine.h"

namespace simt {

class Latency {
 public:
  void begin_launch();
  void begin_block();
  void access(const Access& access, Space space);
  void start_copy(int lane, void* pc);
  void wait_for_copies(int lane);
  void arrive(int lane, Meeting meeting, void* pc);
  void open(Meeting meeting, const std::vector<int>& members);
  void end_block();
  void end_launch();

  // Of the launches since the last call. A line each "launch|kernel|blocks|lanes|cycles|high|block barriers",
  // then "place|offset|cycles" for the code on its critical path.
  std::string take_paths();

 private:
  struct Step {
    void* pc;
    double cycles;
  };
  using Path = std::vector<Step>;
  struct Lane {
    double time = 0, high = 0;
    double group = -1;   // latency of the loads that the next one overlaps with; -1: with none
    double arrival = 0;  // of its asynchronous copies
    Path path;           // since its warp last met
  };

  void spend(Lane& lane, double cycles, double high, void* pc);
  int slowest(const std::vector<int>& of) const;
  void join_block(int slowest);

  std::vector<Lane> lanes_;
  std::vector<Path> warps_;              // since the block last met
  std::unordered_set<uintptr_t> in_l1_;  // sectors that this block has read
  Path block_, worst_;                   // critical paths of this block, of the launch's slowest
  double worst_time_ = 0, worst_high_ = 0;
  int64_t barriers_ = 0, worst_barriers_ = 0;
  std::string paths_;
};

Latency& latency();

}  // namespace simt
