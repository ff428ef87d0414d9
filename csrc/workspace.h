// A planner's memory, which is its caller's: arrays that follow each other. Their struct says them once, in
//
//   lay_out(sizes..., take)   take(n, arrays...): n numbers of each, in the order in which they lie;
//                             take(InPacks{n}, arrays...): what follows each begins aligned
//
// from which their places and their bytes follow. Every array is written before it is read.
#pragma once

#include <cstdint>
#include <type_traits>

#include "host_device.h"

namespace isoload {

// Behind an array that lies at a multiple of 16 bytes, so does the next one. nvcc keeps the address of each:
// a sum of such sizes is no index that it could add to that of an access.
struct InPacks {
  int64_t n;
};
ISOLOAD_HD inline int64_t bytes_of(int64_t n, int64_t size) { return n * size; }
ISOLOAD_HD inline int64_t bytes_of(InPacks packs, int64_t size) {
  return (packs.n * size + 15) & ~int64_t(15);
}

template <class Arrays>
struct Workspace {
  template <class... Sizes>
  ISOLOAD_HD static int64_t bytes(Sizes... sizes) {
    Arrays arrays;
    int64_t bytes = 0;
    arrays.lay_out(sizes..., [&](auto n, auto*&... array) { ((bytes += bytes_of(n, sizeof(*array))), ...); });
    return bytes;
  }
  template <class... Sizes>
  ISOLOAD_HD static Arrays at(void* memory, Sizes... sizes) {
    Arrays arrays;
    char* next = static_cast<char*>(memory);
    auto place = [&](auto n, auto*& array) {
      array = reinterpret_cast<std::decay_t<decltype(array)>>(next);
      if constexpr (std::is_same_v<decltype(n), InPacks>)
        next += bytes_of(n, sizeof(*array));
      else
        next = reinterpret_cast<char*>(array + n);
    };
    arrays.lay_out(sizes..., [&](auto n, auto*&... array) { (place(n, array), ...); });
    return arrays;
  }
};

}  // namespace isoload
