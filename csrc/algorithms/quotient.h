// quotient: x / d in whole numbers without a 64-bit division, which on a GPU is a call of a hundred
// instructions or more. A double's division is a few, and off by one copy at most, which the remainder shows.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace isoload {

// x / d, rounded down, for 0 <= x < 2^63 and 1 <= d < 2^32 with a quotient below 2^51. There the two
// roundings, of x and of the division, are off by less than one together, so that the whole part is right or
// one beside it; the same result wherever a double's division is rounded correctly. A larger quotient is a
// few parts in 2^52 off.
ISOLOAD_HD inline int64_t quotient(int64_t x, int64_t d) {
  const int64_t near = static_cast<int64_t>(static_cast<double>(x) / static_cast<double>(d));
  const int64_t rest = x - near * d;
  return near + (rest >= d) - (rest < 0);
}

// x / d, rounded up, for 0 <= x < 2^31 and 1 <= d < 2^31: 32 bits hold the sum.
ISOLOAD_HD inline int64_t rounded_up(int64_t x, int64_t d) {
  return (static_cast<uint32_t>(x) + static_cast<uint32_t>(d) - 1) / static_cast<uint32_t>(d);
}

}  // namespace isoload
