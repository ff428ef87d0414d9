// A pouring problem beside every instance, what plan_waterfill makes of it, and what is wrong with that.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>

#include "algorithms/plan_waterfill.h"
#include "instances.h"

namespace isoload {

struct Pouring {
  std::vector<int32_t> copies, tokens, limits;  // [R, R]; [R]; [R] or empty
  int32_t per_token;
};

// Even ranks hold no shared slot and odd ranks hardly enough: who visits whom leaves little choice, so the
// start misses some and paths are needed.
inline void draw_contended(Pouring& pour, int R, int top, Rng& rng) {
  pour.limits.assign(R, 0);
  int64_t missing = 0;
  for (int s = 0; s < R; s += 2) {
    pour.tokens[s] = rng.below(2 * top);
    missing += int64_t(pour.per_token) * pour.tokens[s];
    for (int d = 1; d < R; d += 2)
      if (d == s + 1 || d == s - 1 || rng.one_in(R)) pour.copies[s * R + d] = rng.below(4 * top);
  }
  for (int d = 1; d < R; d += 2) missing -= pour.limits[d] = pour.per_token * rng.below(2 * top);
  if (missing > 0) pour.limits[R > 1 ? 1 : 0] += static_cast<int32_t>(missing);
}

// Who visits whom: nobody, two neighbours, some or anybody; tokens everywhere, on few ranks or on one.
inline Pouring draw_pouring(const Instance& in, uint64_t seed) {
  Rng rng(seed ^ 0x5bd1e995);
  Pouring pour;
  const int R = in.R, hot = rng.below(R), kind = rng.below(6), crowd = rng.below(3), top = 1 << rng.below(10);
  pour.per_token = rng.one_in(3) ? rng.between(2, 5) : 1;
  pour.copies.assign(R * R, 0);
  pour.tokens.assign(R, 0);
  if (kind > 3) return draw_contended(pour, R, top, rng), pour;
  for (int s = 0; s < R; ++s) {
    const bool some = crowd == 0 || (crowd == 1 ? rng.one_in(3) : s == hot);
    pour.tokens[s] = some ? rng.below(top) : 0;
    for (int d = 0; d < R && kind; ++d) {
      const bool near = (d - s + R) % R <= 2;
      if (kind == 1 ? near : kind == 2 ? rng.one_in(4) : true)
        pour.copies[s * R + d] = rng.below(top) * (d == hot ? 4 : 1);
    }
  }
  if (rng.one_in(3)) {
    for (int r = 0; r < R; ++r) pour.limits.push_back(pour.per_token * pour.tokens[r] + rng.below(top));
    if (rng.one_in(8)) pour.limits[hot] = 0;  // perhaps refused
  }
  if (rng.one_in(40)) (rng.one_in(2) ? pour.copies[hot] : pour.tokens[hot]) = rng.one_in(2) ? -1 : INT_MAX;
  return pour;
}

struct Poured {
  WaterfillStatus status;
  int64_t certificate[2];  // peak, bound
  int32_t paths;
  std::vector<int32_t> share;

  bool operator==(const Poured& other) const {
    const bool same = status == other.status;
    return same && (status != WaterfillStatus::ok ||
                    (share == other.share && certificate[0] == other.certificate[0] &&
                     certificate[1] == other.certificate[1]));
  }
};

using AllPoured = std::array<Poured, 2>;  // the second with the widest rank sets

inline void poison(AllPoured& all, const Instance& in, int byte) {
  for (Poured& poured : all) {
    poured.share.assign(in.R * in.R, 0);
    std::memset(poured.share.data(), byte, poured.share.size() * sizeof(int32_t));
    std::memset(poured.certificate, byte, sizeof poured.certificate);
  }
}

// Conservation, limits, and the certificate: under a level lower by one the copies do not fit.
inline const char* poured_error(const Instance& in, const Pouring& pour, const Poured& got) {
  const int R = in.R;
  std::vector<int64_t> base(R), received(R);
  int64_t peak = 0, routed_peak = 0;
  for (int s = 0; s < R; ++s) {
    int64_t sent = 0;
    for (int d = 0; d < R; ++d) {
      const int32_t n = got.share[s * R + d];
      if (n < 0) return "a share is negative";
      sent += n, received[d] += n, base[d] += pour.copies[s * R + d];
    }
    if (sent != int64_t(pour.per_token) * pour.tokens[s]) return "a row is not what its source has";
  }
  auto tick = [&](int r) { return in.ticks.empty() ? int64_t(1) : in.ticks[r]; };
  for (int r = 0; r < R; ++r) {
    if (!pour.limits.empty() && received[r] > pour.limits[r]) return "a limit is passed";
    peak = std::max(peak, tick(r) * (base[r] + received[r]));
    routed_peak = std::max(routed_peak, tick(r) * base[r]);
  }
  const int64_t level = got.certificate[1];
  if (got.certificate[0] != peak) return "peak is not the largest rank cost";
  if (peak != level) return "peak and bound differ";
  int64_t room = 0, shared = 0;
  for (int r = 0; r < R; ++r) {
    const int64_t here = (level - 1) / tick(r) - base[r];
    room += pour.limits.empty() ? here : std::min<int64_t>(here, pour.limits[r]);
    shared += int64_t(pour.per_token) * pour.tokens[r];
  }
  return level == routed_peak || room < shared ? nullptr : "a lower level would do";
}

// The first fault of what one lane and many have poured, or null.
inline const char* all_poured_error(const Instance& in, const Pouring& pour, const AllPoured& one,
                                    const AllPoured& many) {
  if (one != many) return "the two teams pour otherwise";
  if (!(one[0] == one[1])) return "pouring differs between widths of rank sets";
  return one[0].status == WaterfillStatus::ok ? poured_error(in, pour, one[0]) : nullptr;
}

}  // namespace isoload
