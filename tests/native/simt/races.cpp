#include "races.h"

#include <algorithm>
#include <string>

#include "findings.h"

namespace simt {
namespace {

std::string name_of(int block, int lane) {
  return "lane " + std::to_string(lane) + " of block " + std::to_string(block);
}

}  // namespace

Races& races() {
  static Races all;
  return all;
}

void Races::begin_launch() {
  launch_era_ = ++era_;
  if (pages_.size() > kMostPages) pages_.clear(), last_page_ = nullptr;
}

void Races::begin_block() {
  block_era_ = ++era_;
  lanes_.assign(machine.lanes, Lane{});
}

void Races::open(Meeting meeting, const std::vector<int>& members) {
  if (meeting == Meeting::exchange) return;  // hands over values, orders no memory
  if (meeting == Meeting::block) {
    for (const int i : members) ++lanes_[i].epoch;
    return;
  }
  uint32_t seen[32] = {};
  for (const int i : members) {
    Lane& lane = lanes_[i];
    lane.seen[i % 32] = ++lane.clock;
    for (int k = 0; k < 32; ++k) seen[k] = std::max(seen[k], lane.seen[k]);
  }
  for (const int i : members) std::copy(seen, seen + 32, lanes_[i].seen);
}

void Races::access(const Access& access, Space space) {
  if (space == Space::shared)
    check_bounds(access);
  else
    check_waited(access.write ? "writes global memory" : "reads global memory", access.pc);
  const Lane& me = lanes_[machine.lane];
  Record now{access.pc, machine.block, me.epoch,     me.clock, static_cast<int16_t>(machine.lane),
             0,         access.write,  access.atomic};
  const uintptr_t end = access.address + access.bytes;
  for (uintptr_t word = access.address / 4 * 4; word < end; word += 4) {
    const uintptr_t first = std::max(word, access.address) - word, last = std::min(word + 4, end) - word;
    now.bytes = static_cast<uint8_t>((1u << last) - (1u << first));
    touch(word_at(word), now, space);
  }
}

Races::Word& Races::word_at(uintptr_t address) {
  const uintptr_t number = address / 4 / kPageWords;
  if (number != last_number_ || last_page_ == nullptr) {
    auto& page = pages_[number];
    if (!page) page = std::make_unique<Word[]>(kPageWords);
    last_number_ = number, last_page_ = page.get();
  }
  return last_page_[address / 4 % kPageWords];
}

bool Races::is_before_now(const Record& then) const {
  if (then.block != machine.block) return false;
  const Lane& me = lanes_[machine.lane];
  if (then.lane == machine.lane || then.epoch < me.epoch) return true;
  return then.lane / 32 == machine.lane / 32 && me.seen[then.lane % 32] > then.clock;
}

void Races::touch(Word& word, const Record& now, Space space) {
  if (const uint64_t era = space == Space::shared ? block_era_ : launch_era_; word.era != era) {
    word.era = era, word.written = 0;
    word.records.clear();
  }
  if (space == Space::shared && (!now.write || now.atomic) && (now.bytes & ~word.written))
    report("uninitialised", "shared memory read that nobody wrote, by " + name_of(now.block, now.lane),
           now.pc);
  if (now.write) word.written |= now.bytes;

  // A record is done with if whatever races with it would race with this access too.
  auto is_done = [&](const Record& then) {
    if (!is_before_now(then)) {
      if ((then.bytes & now.bytes) && (then.write || now.write) && !(then.atomic && now.atomic))
        report("race",
               std::string(space == Space::shared ? "shared" : "global") + " memory, " +
                   (now.write ? "write" : "read") + " by " + name_of(now.block, now.lane) + " after " +
                   (then.write ? "write" : "read") + " by " + name_of(then.block, then.lane),
               now.pc, then.pc);
      return false;
    }
    return !(then.bytes & ~now.bytes) && (now.write || !then.write) && (!now.atomic || then.atomic);
  };
  auto& records = word.records;
  records.erase(std::remove_if(records.begin(), records.end(), is_done), records.end());
  if (!is_redundant(word, now)) records.push_back(now);
}

// Two reads of other blocks, or of other warps between the same two barriers of the block: a write that
// nothing orders after this read races with one of them.
bool Races::is_redundant(const Word& word, const Record& now) const {
  if (now.write) return false;
  const Record* first = nullptr;
  for (const Record& then : word.records) {
    if (then.write || (now.bytes & ~then.bytes)) continue;
    if (first == nullptr) first = &then;
    if (then.block != first->block) return true;
    if (then.block == now.block && then.epoch == now.epoch && first->epoch == now.epoch &&
        then.lane / 32 != first->lane / 32)
      return true;
  }
  return false;
}

void Races::check_waited(const char* what, void* pc) const {
  if (machine.early && !lanes_[machine.lane].waited)
    report("early",
           name_of(machine.block, machine.lane) + ' ' + what + " and has not waited for the kernel ahead",
           pc);
}

void Races::check_bounds(const Access& access) const {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(shared_arena.data),
                  arena = reinterpret_cast<uintptr_t>(&shared_arena);
  if (access.address < arena || access.address >= arena + sizeof shared_arena) return;  // a static variable
  if (access.address >= begin && access.address + access.bytes <= begin + machine.shared_bytes) return;
  report("bounds",
         std::string(access.write ? "write" : "read") + " at byte " +
             std::to_string(static_cast<int64_t>(access.address - begin)) + " of " +
             std::to_string(machine.shared_bytes) + " bytes of shared memory, by " +
             name_of(machine.block, machine.lane),
         access.pc);
}

}  // namespace simt
