// borrow: which expert every spare slot holds for this batch, where that expert lives, and the numbers of a
// gradient pool.
//
// Peers' memory is reached by address. An expert without a home, or an id that is no expert, borrows nothing.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_fp16.h>
#endif

#include "host_device.h"

namespace isoload {

// Where an expert's weights are, {-1, -1} if nowhere.
struct Home {
  int32_t rank, row;
};

struct Borrowing {
  const int32_t* slot_to_expert;  // [R * S]
  const Home* home;               // [E]
  const int64_t* peers;           // [R, W] address of row 0 of rank r's stack w, 0 = none
  int R, S, E, W, spare_slots, rank;

  ISOLOAD_HD int64_t slot(int r, int j) const { return (int64_t(r) + 1) * S - spare_slots + j; }

  // Whether rank r's j-th spare slot borrows anything: another id than -1.
  ISOLOAD_HD bool is_filled(int r, int j) const { return slot_to_expert[slot(r, j)] != -1; }

  // Of the expert in rank r's j-th spare slot.
  ISOLOAD_HD Home home_of(int r, int j) const {
    const int32_t e = slot_to_expert[slot(r, j)];
    if (e < 0 || e >= E) return {-1, -1};
    const Home at = home[e];
    return at.rank >= 0 && at.rank < R && at.row >= 0 ? at : Home{-1, -1};
  }
  ISOLOAD_HD int64_t peer(int r, int w) const { return peers[int64_t(r) * W + w]; }
};

// This rank's rows of one stack, each of `size` bytes (borrow) or values (borrow_backward).
struct Rows {
  void* data;
  int64_t size;
};

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// A value in the dtype that sums are made in: exact, so that CPU and CUDA add the same numbers.
ISOLOAD_HD inline double widen(double value) { return value; }
ISOLOAD_HD inline float widen(float value) { return value; }
ISOLOAD_HD inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}
ISOLOAD_HD inline float widen(BFloat16 value) { return float_of(uint32_t(value.bits) << 16); }
ISOLOAD_HD inline float widen(Float16 value) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(value.bits));  // one instruction
#else
  const uint32_t sign = uint32_t(value.bits & 0x8000) << 16, rest = value.bits & 0x7fff;
  if (rest < 0x0400) {  // subnormal: a multiple of 2^-24, normal in float32
    const float small = static_cast<float>(rest) * 0x1p-24f;
    return sign ? -small : small;
  }
  const uint32_t rebias = rest < 0x7c00 ? (127 - 15) << 23 : (255 - 31) << 23;  // the latter for inf and NaN
  return float_of(sign | ((rest << 13) + rebias));
#endif
}

// The nearest value of the total's dtype, ties to even, as torch rounds.
ISOLOAD_HD inline void narrow(double value, double& to) { to = value; }
ISOLOAD_HD inline void narrow(float value, float& to) { to = value; }
ISOLOAD_HD inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}
ISOLOAD_HD inline void narrow(float value, BFloat16& to) {
  const uint32_t bits = bits_of(value), even = bits >> 16 & 1;
  to.bits = static_cast<uint16_t>(value != value ? 0x7fc0 : (bits + 0x7fff + even) >> 16);
}
ISOLOAD_HD inline void narrow(float value, Float16& to) {
#ifdef __CUDA_ARCH__
  to.bits = value != value ? 0x7e00 : __half_as_ushort(__float2half_rn(value));
#else
  const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  uint32_t half =
      (rest + 0xfff + (rest >> 13 & 1) - (112u << 23)) >> 13;  // carries into infinity from 65520 on
  if (rest < 0x38800000)
    half = bits_of(float_of(rest) + 0.5f) - 0x3f000000;  // subnormal: 0.5's steps are 2^-24
  if (rest >= 0x47800000) half = rest > 0x7f800000 ? 0x7e00 : 0x7c00;
  to.bits = static_cast<uint16_t>(sign | half);
#endif
}

}  // namespace isoload
