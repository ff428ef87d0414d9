#include "block.h"

#include <link.h>
#include <pthread.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <random>
#include <string>

#include "barrier_sites.h"
#include "findings.h"
#include "machine.h"
#include "races.h"

namespace simt {

Machine machine;
SharedArena shared_arena;

namespace {

constexpr std::size_t kStack = 256 * 1024;
constexpr unsigned char kSpoilt = 0xA5;

struct Copy {
  char* to;
  const char* from;
  std::size_t bytes;
  void* pc;
};

struct Lane {
  ucontext_t first;  // before its first block
  jmp_buf resume;
  bool started = false, done = false;
  Meeting waits = Meeting::none;
  unsigned mask = 0;
  void* pc = nullptr;  // of the meeting
  uint64_t given = 0;
  bool any_given = false;     // whether a lane of the block gave a number other than 0
  uint64_t* taken = nullptr;  // [32]
  std::vector<void*> calls;
  std::vector<Copy> copies;  // on their way
};

class Block {
 public:
  Block() : lanes_(kMostLanes) {
    const std::size_t stacks = kMostLanes * kStack, bytes = stacks + kMostLanes * 32 * sizeof(uint64_t);
    void* const memory =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) give_up("no memory for the lanes' stacks");
    char* const begin = static_cast<char*>(memory);
    machine.lanes_begin = reinterpret_cast<uintptr_t>(begin), machine.lanes_end = machine.lanes_begin + bytes;
    for (int i = 0; i < kMostLanes; ++i) {
      mprotect(begin + i * kStack, static_cast<std::size_t>(sysconf(_SC_PAGESIZE)), PROT_NONE);
      lanes_[i].taken = reinterpret_cast<uint64_t*>(begin + stacks) + i * 32;
    }
  }

  void run(void (*body)(void*), void* closure) {
    body_ = body, closure_ = closure;
    for (int i = 0; i < machine.lanes; ++i) {
      lanes_[i].done = false, lanes_[i].waits = Meeting::none;
      ready_.push_back(i);
    }
    while (!ready_.empty()) {
      if (seed_ != 0) std::swap(ready_.front(), ready_[random_() % ready_.size()]);
      machine.lane = ready_.front();
      ready_.pop_front();
      resume(lanes_[machine.lane]);
      machine.lane = -1;
    }
    for (int i = 0; i < machine.lanes; ++i)
      if (!lanes_[i].done) stuck(lanes_[i], i);
  }

  // The running lane waits until the meeting opens.
  void meet(Meeting meeting, unsigned mask, void* pc) {
    Lane& me = running();
    if (meeting != Meeting::block && !(mask >> (machine.lane % 32) & 1))
      give_up("a lane at a warp barrier whose mask lacks it", pc);
    me.waits = meeting, me.mask = mask, me.pc = pc;
    if (complete(meeting, mask)) open(meeting, mask);
    yield(me);
  }

  Lane& running() { return lanes_[machine.lane]; }

  void seed(uint64_t seed) { seed_ = seed, random_.seed(seed); }

 private:
  static void enter() {
    for (;;) {  // a block each time
      Block& block = here();
      Lane& me = block.running();
      me.calls.clear();
      block.body_(block.closure_);
      if (!me.copies.empty())
        report("copy", "an asynchronous copy that nobody waits for", me.copies.front().pc);
      me.copies.clear();
      if (machine.find_races) races().leave();
      me.done = true;
      yield(me);
    }
  }

  // No function that calls setjmp may hold what changes between its two returns.
  void resume(Lane& lane) {
    if (_setjmp(main_)) return;
    if (lane.started) _longjmp(lane.resume, 1);
    lane.started = true;
    getcontext(&lane.first);
    lane.first.uc_stack.ss_sp =
        reinterpret_cast<char*>(machine.lanes_begin) + (&lane - lanes_.data()) * kStack;
    lane.first.uc_stack.ss_size = kStack;
    lane.first.uc_link = nullptr;
    makecontext(&lane.first, &Block::enter, 0);
    setcontext(&lane.first);
  }
  static void yield(Lane& lane) {
    if (_setjmp(lane.resume) == 0) _longjmp(here().main_, 1);
  }

  template <class F>
  void for_members(Meeting meeting, unsigned mask, F&& f) {
    const int first = meeting == Meeting::block ? 0 : machine.lane / 32 * 32;
    const int most = meeting == Meeting::block ? machine.lanes : std::min(first + 32, machine.lanes);
    for (int i = first; i < most; ++i)
      if (meeting == Meeting::block || (mask >> (i - first) & 1)) f(lanes_[i], i);
  }

  // A lane that has left never comes: CUDA promises nothing else.
  bool complete(Meeting meeting, unsigned mask) {
    bool all = true;
    for_members(meeting, mask, [&](const Lane& lane, int) {
      all &= !lane.done && lane.waits == meeting && (meeting == Meeting::block || lane.mask == mask);
    });
    return all;
  }

  void open(Meeting meeting, unsigned mask) {
    std::vector<int>& members = members_;
    members.clear();
    bool any = false;
    for_members(meeting, mask, [&](const Lane& lane, int) { any |= lane.given != 0; });
    for_members(meeting, mask, [&](Lane& lane, int i) {
      lane.waits = Meeting::none, lane.any_given = any;
      members.push_back(i);
      ready_.push_back(i);
      if (meeting != Meeting::exchange) return;
      std::memset(lane.taken, kSpoilt, 32 * sizeof(uint64_t));
      for_members(meeting, mask, [&](const Lane& other, int j) { lane.taken[j % 32] = other.given; });
    });
    if (machine.find_races) races().open(meeting, members);
  }

  [[noreturn]] void stuck(const Lane& lane, int i) {
    int waiting = 0, left = 0;
    for (int k = 0; k < machine.lanes; ++k) lanes_[k].done ? ++left : ++waiting;
    give_up("a barrier that not every lane comes to: lane " + std::to_string(i) + " of block " +
                std::to_string(machine.block) + " waits, " + std::to_string(waiting) + " wait and " +
                std::to_string(left) + " have left",
            lane.pc);
  }

 public:
  static Block& here() {
    static Block block;
    return block;
  }

 private:
  std::vector<Lane> lanes_;
  std::deque<int> ready_;
  std::vector<int> members_;
  jmp_buf main_;
  void (*body_)(void*) = nullptr;
  void* closure_ = nullptr;
  uint64_t seed_ = 0;
  std::mt19937_64 random_;
};

// This library's thread-local variables: the static __shared__ ones, for cuda_runtime.h makes them so. What
// csrc/cpu has besides is never used here.
thread_local char in_static_shared;

void find_static_shared() {
  machine.static_begin = machine.static_end = reinterpret_cast<uintptr_t>(&in_static_shared);
  dl_iterate_phdr(
      [](dl_phdr_info* library, std::size_t, void*) {
        const uintptr_t begin = reinterpret_cast<uintptr_t>(library->dlpi_tls_data);
        for (int i = 0; begin != 0 && i < library->dlpi_phnum; ++i) {
          const uintptr_t end = begin + library->dlpi_phdr[i].p_memsz;
          if (library->dlpi_phdr[i].p_type != PT_TLS || machine.static_begin < begin ||
              machine.static_begin >= end)
            continue;
          machine.static_begin = begin, machine.static_end = end;
          return 1;
        }
        return 0;
      },
      nullptr);
}

void find_host_stack() {
  pthread_attr_t attributes;
  void* begin = nullptr;
  std::size_t bytes = 0;
  if (pthread_getattr_np(pthread_self(), &attributes) != 0) give_up("no bounds of the host's stack");
  pthread_attr_getstack(&attributes, &begin, &bytes);
  pthread_attr_destroy(&attributes);
  machine.host_begin = reinterpret_cast<uintptr_t>(begin), machine.host_end = machine.host_begin + bytes;
}

// Torch may call from another thread than before.
void find_thread() {
  static pthread_t known = 0;
  if (known == pthread_self()) return;
  known = pthread_self();
  find_static_shared();
  find_host_stack();
}

// What the last owner left is no value: a kernel that reads it must not be right by chance.
void spoil_shared_memory() {
  std::memset(&shared_arena, kSpoilt, sizeof shared_arena.before + machine.shared_bytes + 64);
  std::memset(reinterpret_cast<void*>(machine.static_begin), kSpoilt,
              machine.static_end - machine.static_begin);
}

}  // namespace

Index thread_index() { return {static_cast<unsigned>(machine.lane)}; }
Index block_index() { return {static_cast<unsigned>(machine.block)}; }
Index block_size() { return {static_cast<unsigned>(machine.lanes)}; }
Index grid_size() { return {static_cast<unsigned>(machine.blocks)}; }

Space space_of(uintptr_t a) {
  if (a >= machine.lanes_begin && a < machine.lanes_end) return Space::own;
  if (a >= machine.host_begin && a < machine.host_end) return Space::own;
  const uintptr_t dynamic = reinterpret_cast<uintptr_t>(&shared_arena);
  if (a >= dynamic && a < dynamic + sizeof shared_arena) return Space::shared;
  return a >= machine.static_begin && a < machine.static_end ? Space::shared : Space::global;
}

[[gnu::noinline]] void meet(Meeting meeting, unsigned mask) {
  void* const pc = __builtin_return_address(0);
  if (machine.note_barriers && !barrier_sites().pass(pc)) return;
  Block::here().meet(meeting, mask, pc);
}

[[gnu::noinline]] bool meet_any(bool b) {
  void* const pc = __builtin_return_address(0);
  if (machine.note_barriers && !barrier_sites().pass(pc)) return b;
  Lane& me = Block::here().running();
  me.given = b;
  Block::here().meet(Meeting::block, ~0u, pc);
  return me.any_given;
}

[[gnu::noinline]] const uint64_t* exchange(unsigned mask, uint64_t word) {
  Lane& me = Block::here().running();
  me.given = word;
  Block::here().meet(Meeting::exchange, mask, __builtin_return_address(0));
  return me.taken;
}

[[gnu::noinline]] void copy_async(void* to, const void* from, std::size_t bytes) {
  void* const pc = __builtin_return_address(0);
  const Access read{reinterpret_cast<uintptr_t>(from), bytes, false, false, pc};
  if (machine.find_races) races().access(read, space_of(read.address));
  Block::here().running().copies.push_back(
      {static_cast<char*>(to), static_cast<const char*>(from), bytes, pc});
}

// Only now the bytes arrive: who reads them sooner reads what was there before.
void wait_for_copies() {
  Lane& me = Block::here().running();
  for (const Copy& copy : me.copies) {
    std::memcpy(copy.to, copy.from, copy.bytes);
    on_access({reinterpret_cast<uintptr_t>(copy.to), copy.bytes, true, false, copy.pc});
  }
  me.copies.clear();
}

void wait_for_kernel_ahead() {
  if (machine.find_races) races().wait_for_kernel_ahead();
}

[[gnu::noinline]] void let_next_kernel_start() {
  if (machine.find_races) races().let_next_kernel_start(__builtin_return_address(0));
}

void run_grid(void* kernel, int64_t blocks, int lanes, int64_t shared_bytes, void (*body)(void*),
              void* closure) {
  if (shared_bytes > machine.shared_limit || lanes > kMostLanes)
    give_up("a launch with more lanes or shared memory than a block has");
  Block& block = Block::here();
  find_thread();
  machine.kernel = kernel, machine.blocks = blocks, machine.lanes = lanes,
  machine.shared_bytes = shared_bytes;
  machine.most_shared_bytes = std::max(machine.most_shared_bytes, shared_bytes);
  ++machine.launches;
  machine.early_launches += machine.early;
  if (machine.find_races) races().begin_launch();
  for (int64_t b = 0; b < blocks; ++b) {
    machine.block = static_cast<int>(b);
    spoil_shared_memory();
    if (machine.find_races) races().begin_block();
    block.run(body, closure);
  }
}

void set_seed(uint64_t seed) { Block::here().seed(seed); }

std::vector<void*>& calls() { return Block::here().running().calls; }

}  // namespace simt
