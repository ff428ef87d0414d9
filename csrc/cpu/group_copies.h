// group_copies on one core: sorts copies by slot, stable. Returns how many there are; more than places:
// nothing but ends is written.
#pragma once

#include "cpu/cpu.h"

namespace isoload::cpu {

template <class Slot>
int64_t group_copies(const Slot* slots, const CopyGroup& in, const Groups& out) {
  const int S = in.num_slots;
  auto slot = [&](int64_t i) {
    const int64_t local = int64_t(slots[i]) - in.first;
    return local >= 0 && local < S ? static_cast<int>(local) : -1;
  };
  for (int s = 0; s < S; ++s) out.ends[s] = 0;
  for (int64_t i = 0; i < in.n; ++i)
    if (slot(i) >= 0) ++out.ends[slot(i)];
  int64_t present = 0;
  for (int s = 0; s < S; ++s) {
    const int32_t here = out.ends[s];
    out.ends[s] = static_cast<int32_t>(present);  // becomes the end as copies are placed
    present += here;
  }
  if (present > in.num_places) return present;
  for (int64_t i = 0; i < in.n; ++i) {
    const int s = slot(i);
    out.position[i] = s < 0 ? in.num_places : out.ends[s]++;
    if (s < 0) continue;
    out.copy[out.position[i]] = i;
    out.slot[out.position[i]] = s;
  }
  for (int64_t c = present; c < in.num_places; ++c) {
    out.copy[c] = 0;
    out.slot[c] = S > 0 ? S - 1 : 0;
  }
  return present;
}

}  // namespace isoload::cpu
