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

// One more number in a seed: the next stream of many.
ISOLOAD_HD inline uint64_t mix(uint64_t seed, uint64_t part) {
  seed = (seed + part + 1) * 0x9E3779B97F4A7C15u;
  return seed ^ seed >> 31;
}

// The stream of one rank and batch: `seed` or, with the batch's number in memory, which a captured graph
// reads anew, what the host would mix of seed, number and rank.
struct Stream {
  uint64_t seed;
  const int64_t* step;  // [1] or null
  int rank;

  ISOLOAD_HD uint64_t key() const {
    return step ? mix(mix(seed, static_cast<uint64_t>(*step)), static_cast<uint64_t>(rank)) : seed;
  }
};

}  // namespace isoload
