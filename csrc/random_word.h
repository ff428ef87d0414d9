// SplitMix64, counter based: any lane on any device can draw any word of a stream.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace isoload {

// Word i of the stream `seed`.
ISOLOAD_HD inline uint64_t random_word(uint64_t seed, uint64_t i) {
  uint64_t z = seed + (i + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return z ^ z >> 31;
}

}  // namespace isoload
