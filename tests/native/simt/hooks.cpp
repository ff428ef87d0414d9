// The functions that g++ -fsanitize=thread calls: ThreadSanitizer's names, our run-time behind them.
#include <cstdint>
#include <utility>

#include "block.h"
#include "machine.h"
#include "races.h"

namespace simt {

void on_access(const Access& access) {
  if (machine.lane < 0) return;
  const Space space = space_of(access.address);
  if (space == Space::own) return;
  if (machine.find_races) races().access(access, space);
}

namespace {

void touch(const volatile void* p, std::size_t bytes, bool write, void* pc) {
  on_access({reinterpret_cast<uintptr_t>(p), bytes, write, false, pc});
}

void touch_atomic(const int* p, void* pc) {
  on_access({reinterpret_cast<uintptr_t>(p), sizeof *p, true, true, pc});
}

}  // namespace

#define PC __builtin_return_address(0)
[[gnu::noinline]] int atomic_add(int* p, int v) { return touch_atomic(p, PC), std::exchange(*p, *p + v); }
[[gnu::noinline]] int atomic_or(int* p, int v) { return touch_atomic(p, PC), std::exchange(*p, *p | v); }
[[gnu::noinline]] int atomic_exchange(int* p, int v) { return touch_atomic(p, PC), std::exchange(*p, v); }

}  // namespace simt

#define ACCESS(name, bytes, write) \
  void __tsan_##name(void* p) { simt::touch(p, bytes, write, PC); }
#define ACCESSES(bytes)                       \
  ACCESS(read##bytes, bytes, false)           \
  ACCESS(write##bytes, bytes, true)           \
  ACCESS(unaligned_read##bytes, bytes, false) \
  ACCESS(unaligned_write##bytes, bytes, true)

extern "C" {
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void* p, unsigned long bytes) { simt::touch(p, bytes, false, PC); }
void __tsan_write_range(void* p, unsigned long bytes) { simt::touch(p, bytes, true, PC); }
void __tsan_func_entry(void* caller) {
  if (simt::machine.lane >= 0) simt::calls().push_back(caller);
}
void __tsan_func_exit() {
  if (simt::machine.lane >= 0) simt::calls().pop_back();
}
void __tsan_init() {}

// What ranks in other processes read and write too.
void __tsan_atomic32_store(volatile uint32_t* p, uint32_t value, int) {
  simt::on_access({reinterpret_cast<uintptr_t>(p), 4, true, true, PC});
  __atomic_store_n(p, value, __ATOMIC_RELEASE);
}
uint32_t __tsan_atomic32_load(const volatile uint32_t* p, int) {
  simt::on_access({reinterpret_cast<uintptr_t>(p), 4, false, true, PC});
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

// The host's part of csrc/cuda: std::atomic pointers, and the guard of a static variable.
uint8_t __tsan_atomic8_load(const volatile uint8_t* p, int) { return *p; }
uint64_t __tsan_atomic64_load(const volatile uint64_t* p, int) { return *p; }
void __tsan_atomic64_store(volatile uint64_t* p, uint64_t value, int) { *p = value; }
}
