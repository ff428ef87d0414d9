#include "barrier_sites.h"

#include "block.h"
#include "findings.h"
#include "machine.h"

namespace simt {

BarrierSites& barrier_sites() {
  static BarrierSites all;
  return all;
}

bool BarrierSites::pass(void* pc) {
  here_.assign(1, machine.kernel);
  here_.insert(here_.end(), calls().begin(), calls().end());
  here_.push_back(pc);
  const uint64_t number = numbers_.try_emplace(here_, numbers_.size()).first->second;
  noted_.insert(number);
  return skipped_.empty() || skipped_.count(number) == 0;
}

std::string BarrierSites::take() {
  std::string text;
  for (const auto& [site, number] : numbers_) {
    if (noted_.count(number) == 0) continue;
    text += std::to_string(number) + '|' + offset_of(site.front());
    for (auto pc = site.rbegin(); pc + 1 != site.rend(); ++pc) text += '|' + offset_of(*pc);
    text += '\n';
  }
  noted_.clear();
  return text;
}

}  // namespace simt
