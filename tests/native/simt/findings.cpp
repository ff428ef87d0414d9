#include "findings.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <utility>
#include <vector>

#include "barrier_sites.h"
#include "block.h"
#include "machine.h"

namespace simt {
namespace {

struct Findings {
  std::set<std::vector<std::string>> known;  // without the text: of many lanes and addresses, the first
  std::string lines;
  int told = -1;  // a file descriptor that gets every line at once
};

Findings& findings() {
  static Findings all;
  return all;
}

void add(const std::string& line) {
  findings().lines += line;
  const int told = findings().told;
  if (told >= 0 && write(told, line.data(), line.size()) < 0) std::abort();
}

}  // namespace

std::string offset_of(const void* pc) {
  Dl_info here;
  if (pc == nullptr || dladdr(reinterpret_cast<const void*>(&offset_of), &here) == 0) return "0";
  char text[32];
  std::snprintf(
      text, sizeof text, "%lx",
      static_cast<unsigned long>(static_cast<const char*>(pc) - static_cast<const char*>(here.dli_fbase)));
  return text;
}

void report(const std::string& kind, const std::string& text, void* pc, void* before) {
  const std::string kernel = offset_of(machine.kernel), here = offset_of(pc), there = offset_of(before);
  if (!findings().known.insert({kind, kernel, here, there}).second) return;
  add(kind + '|' + text + '|' + kernel + '|' + here + '|' + there + '\n');
}

void give_up(const std::string& text, void* pc) {
  report("stuck", text, pc);
  std::fprintf(stderr, "simt: %s, at %s in kernel %s\n", text.c_str(), offset_of(pc).c_str(),
               offset_of(machine.kernel).c_str());
  std::abort();
}

const char* as_text(std::string text) {
  static std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

}  // namespace simt

// For ctypes.
extern "C" {
#define SIMT_API __attribute__((visibility("default")))
SIMT_API const char* simt_findings() { return simt::as_text(simt::findings().lines); }
SIMT_API void simt_forget_findings() { simt::findings().known.clear(), simt::findings().lines.clear(); }
SIMT_API void simt_tell(int descriptor) { simt::findings().told = descriptor; }
SIMT_API uint64_t simt_launches() { return simt::machine.launches; }
SIMT_API uint64_t simt_early_launches() { return simt::machine.early_launches; }
SIMT_API uint64_t simt_memsets() { return simt::machine.memsets; }
SIMT_API void simt_limit_shared(int64_t bytes) {
  simt::machine.shared_limit = std::min(bytes, simt::kMostShared);
  simt::machine.most_shared_bytes = 0;
}
SIMT_API int64_t simt_most_shared_bytes() { return simt::machine.most_shared_bytes; }
SIMT_API void simt_seed(uint64_t seed) { simt::set_seed(seed); }
SIMT_API void simt_watch(bool races, bool barriers) {
  simt::machine.find_races = races, simt::machine.note_barriers = barriers;
}
SIMT_API const char* simt_barriers() { return simt::as_text(simt::barrier_sites().take()); }
SIMT_API void simt_skip_barrier(uint64_t site) { simt::barrier_sites().skip(site); }
}
