// Where barriers stand: the place of the call and the calls around it. A skipped one is passed as if it were
// not there, which removes a barrier from a kernel without another build.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace simt {

class BarrierSites {
 public:
  // Notes the barrier that the running lane has come to; false if it is skipped.
  bool pass(void* pc);
  void skip(uint64_t site) { skipped_.insert(site); }

  // Those noted since the last call, a line each: number|kernel|place|calls around it, innermost first.
  std::string take();

 private:
  using Site = std::vector<void*>;  // kernel, calls outermost first, place
  std::map<Site, uint64_t> numbers_;
  std::set<uint64_t> noted_;
  std::set<uint64_t> skipped_;
  Site here_;
};

BarrierSites& barrier_sites();

}  // namespace simt
