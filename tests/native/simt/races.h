// Which accesses of different lanes nothing orders: a happens-before relation over shared and global memory.
//
// A lane's accesses are ordered before another's if both lanes have since been at one barrier: of the block
// (an epoch, the same in all lanes) or of the warp (a clock per lane, and what a lane has seen of the other
// clocks of its warp). Blocks of a launch are never ordered. Two accesses of one byte without an order, one
// of them a write and not both atomic, are a race, whatever the values. Every word remembers the accesses
// that a later one may still race with.
//
// A kernel that starts early keeps the rules of csrc/cuda/early_start.cuh, each of its lanes: it waits for
// the kernel ahead before it touches global memory, before it lets the next one start, and before it leaves.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "block.h"
#include "machine.h"

namespace simt {

class Races {
 public:
  void begin_launch();
  void begin_block();
  void access(const Access& access, Space space);
  void open(Meeting meeting, const std::vector<int>& members);
  void wait_for_kernel_ahead() { me().waited = true; }
  void let_next_kernel_start(void* pc) const { check_waited("lets the next kernel start", pc); }
  void leave() const { check_waited("leaves", nullptr); }

 private:
  struct Record {
    void* pc;
    int32_t block;
    uint32_t epoch, clock;  // block barriers passed; warp barriers passed
    int16_t lane;
    uint8_t bytes;  // of the word, a bit each
    bool write, atomic;
  };
  struct Word {
    uint64_t era = 0;     // the launch or block that its records are of
    uint8_t written = 0;  // bytes
    std::vector<Record> records;
  };
  struct Lane {
    uint32_t epoch, clock;
    uint32_t
        seen[32];  // of each lane of the warp: its accesses with lower clocks come before this lane's next
    bool waited;   // for the kernel ahead, if that may still run
  };
  static constexpr uintptr_t kPageWords = 256;
  static constexpr std::size_t kMostPages = 1 << 14;

  Lane& me() { return lanes_[machine.lane]; }
  Word& word_at(uintptr_t address);
  void touch(Word& word, const Record& now, Space space);
  bool is_before_now(const Record& then) const;
  bool is_redundant(const Word& word, const Record& now) const;
  void check_bounds(const Access& access) const;
  void check_waited(const char* what, void* pc) const;

  std::unordered_map<uintptr_t, std::unique_ptr<Word[]>> pages_;
  uintptr_t last_number_ = 0;
  Word* last_page_ = nullptr;
  uint64_t era_ = 0, launch_era_ = 0, block_era_ = 0;
  std::vector<Lane> lanes_;
};

Races& races();

}  // namespace simt
