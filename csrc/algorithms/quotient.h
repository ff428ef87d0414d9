// quotient: x / d in whole numbers without a 64-bit division, which on a GPU is a call of a hundred
// instructions or more. A double's division is a few, and the same wherever it is rounded correctly.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace isoload {

// x / d, rounded down, for x >= 0 and d >= 1 with x + d <= 2^53. The next whole number n is at least 1/d
// away, and half a step between doubles below it is less than n / 2^53, which is 1/d at most: rounding cannot
// reach it. Of a larger x the quotient may be a few parts in 2^53 off.
ISOLOAD_HD ISOLOAD_ONCE inline int64_t quotient(int64_t x, int64_t d) {
  return static_cast<int64_t>(static_cast<double>(x) / static_cast<double>(d));
}

// The same for any x >= 0 and a quotient below 2^51. There the roundings, of x and of the division, are off
// by less than one together: the whole part is right or one beside it, which the remainder shows.
ISOLOAD_HD inline int64_t quotient_of_large(int64_t x, int64_t d) {
  const int64_t near = quotient(x, d), rest = x - near * d;
  return near + (rest >= d) - (rest < 0);
}

// x / d, rounded up, for 0 <= x < 2^31 and 1 <= d < 2^31: 32 bits hold the sum.
ISOLOAD_HD inline int64_t rounded_up(int64_t x, int64_t d) {
  return (static_cast<uint32_t>(x) + static_cast<uint32_t>(d) - 1) / static_cast<uint32_t>(d);
}

// x / d, rounded down, for many x of one d, both below 2^31: the multiplication is off by one at most,
// because inverse is less than 1 below 2^32 / d.
struct Divisor {
  uint32_t d, inverse;
  ISOLOAD_HD explicit Divisor(int divisor) : Divisor(divisor, UINT32_MAX / static_cast<uint32_t>(divisor)) {}
  ISOLOAD_HD Divisor(int divisor, uint32_t inverse) : d(divisor), inverse(inverse) {}
  ISOLOAD_HD int quotient(int x) const {
    const uint32_t near = static_cast<uint32_t>(uint64_t(static_cast<uint32_t>(x)) * inverse >> 32);
    return static_cast<int>(near + (static_cast<uint32_t>(x) - near * d >= d));
  }
};

}  // namespace isoload
