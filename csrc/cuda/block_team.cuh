// BlockTeam: the team (team.h) of one CUDA block of kWarps whole warps. The only place with shuffles.
//
// Every lane of the block must come to every sync, reduction and scan, as team.h has it. A block of one warp
// needs no shared memory and no block barrier: its lanes meet in __syncwarp, which orders their memory too.
#pragma once

#include <cstdint>

#include "team.h"

namespace isoload {

// kRolled: the turns of a for_each are not written out. Where a lane has one turn anyway, that is only code.
template <int kWarps, bool kRolled = false>
class BlockTeam {
 public:
  static constexpr int kLanes = kWarps * 32;
  using Warp = BlockTeam<1, kRolled>;
  static_assert(kWarps >= 1 && kWarps <= 32, "a block has 1..32 warps");

  // What the warps share, in shared memory: operands of this reduction and of the one before.
  struct Group {
    int64_t partial[2][kWarps];
  };

  __device__ explicit BlockTeam(Group& group) : group_(&group) {}
  // A warp of a larger block: its own rank, and nothing shared.
  __device__ BlockTeam() : group_(nullptr) { static_assert(kWarps == 1, "only a warp shares nothing"); }

  __device__ int rank() const { return kWarps == 1 ? lane() : threadIdx.x; }
  __device__ int size() const { return kLanes; }
  __device__ void sync() const {
    if constexpr (kWarps == 1)
      __syncwarp();
    else
      __syncthreads();
  }
  template <class F>
  __device__ void for_each(int n, F&& f) const {
    if constexpr (kRolled) {
#pragma unroll 1
      for (int i = rank(); i < n; i += kLanes) f(i);
    } else {
      for (int i = rank(); i < n; i += kLanes) f(i);
    }
  }
  template <class Wide, class F, class G>
  __device__ void for_each_by(int n, Wide&& wide, F&& f, G&& g) const {
    by_width(n, n, wide, f, g);
  }
  template <class Wide, class F, class G>
  __device__ int keep_by(int n, int most, Wide&& wide, F&& f, G&& g) const {
    return by_width(n < kLanes ? n : kLanes, most * kWarps, wide, f, g);
  }
  __device__ int groups() const { return kWarps; }
  __device__ int group() const { return warp(); }
  template <class F>
  __device__ void for_each_group(int n, F&& f) const {
    Warp group;
#pragma unroll 1
    for (int i = warp(); i < n; i += kWarps) f(i, group);
  }
  template <class F>
  __device__ void alone(F&& f) const {
    Warp group;
    if (kWarps == 1 || warp() == 0) f(group);
    sync();
  }
  // Each lane keeps its columns, so that its loads need not wait for a store.
  __device__ ColumnSums column_sums(const int32_t* rows, int num_rows, int n, int32_t* sums) const {
    constexpr int kAhead = 8;
    ColumnSums seen;
    for (int i = rank(); i < n; i += kLanes) {
      uint32_t sum = 0;
      for (int first = 0; first < num_rows; first += kAhead) {
        int32_t v[kAhead];
#pragma unroll
        for (int a = 0; a < kAhead; ++a)
          v[a] = rows[int64_t(first + a < num_rows ? first + a : num_rows - 1) * n + i];
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          if (first + a < num_rows) sum += static_cast<uint32_t>(v[a]);
          seen.any_row |= v[a], seen.any_sum |= static_cast<int32_t>(sum);
        }
      }
      sums[i] = static_cast<int32_t>(sum);
    }
    return seen;
  }
  __device__ int32_t sum32(int32_t v) {
    v = __reduce_add_sync(kAll, v);
    if constexpr (kWarps == 1)
      return v;
    else
      return over_warps(v, [](int32_t a, int32_t b) { return a + b; });
  }
  __device__ int32_t max32(int32_t v) {
    v = __reduce_max_sync(kAll, v);
    if constexpr (kWarps == 1)
      return v;
    else
      return over_warps(v, [](int32_t a, int32_t b) { return a > b ? a : b; });
  }
  __device__ uint32_t lanes_with(bool b) const {
    static_assert(kWarps == 1, "of a group");
    return __ballot_sync(kAll, b);
  }
  __device__ int32_t lanes_before(bool b, int32_t& total) const {
    const unsigned all = lanes_with(b);
    total = __popc(all);
    return __popc(all & ((1u << lane()) - 1));
  }
  // Of a number of 64 bits the upper half decides first.
  template <class F>
  __device__ auto largest(int n, F&& f, int& at) const {
    static_assert(kWarps == 1, "of a group");
    decltype(f(0)) mine = 0;
    int here = n;
    for_each(n, [&](int i) {
      const auto v = f(i);
      if (here == n || v > mine) mine = v, here = i;
    });
    bool mine_is = here < n;
    const auto most = warp_max(mine, mine_is);
    at = n - static_cast<int>(__reduce_max_sync(kAll, mine_is ? n - here : 0));
    return most;
  }
  __device__ int from_lane_of(int i, int v) const {
    static_assert(kWarps == 1, "of a group");
    return __shfl_sync(kAll, v, i % 32);
  }
  template <class F>
  __device__ int first(int from, int n, F&& f) const {
    static_assert(kWarps == 1, "of a group");
#pragma unroll 1
    for (; from < n; from += 32) {
      const unsigned found = __ballot_sync(kAll, from + lane() < n && f(from + lane()));
      if (found) return from + __ffs(found) - 1;
    }
    return n;
  }
  __device__ int64_t sum(int64_t v) {
    constexpr int kBits =
        27;  // of 32 lanes, so many add up in 32 bits; three reductions cost less than shuffles
    const uint64_t low = __reduce_add_sync(kAll, static_cast<uint32_t>(v) & ((1u << kBits) - 1));
    const uint64_t middle = __reduce_add_sync(kAll, static_cast<uint32_t>(v >> kBits) & ((1u << kBits) - 1));
    const uint64_t high = __reduce_add_sync(kAll, static_cast<uint32_t>(v >> 2 * kBits));
    v = static_cast<int64_t>(low + (middle << kBits) + (high << 2 * kBits));
    return over_warps(v, [](int64_t a, int64_t b) { return a + b; });
  }
  __device__ int64_t max(int64_t v) {  // two reductions of 32 bits cost less than five rounds of shuffles
    const int32_t high = static_cast<int32_t>(v >> 32), top = __reduce_max_sync(kAll, high);
    const uint32_t low = __reduce_max_sync(kAll, high == top ? static_cast<uint32_t>(v) : 0u);
    return over_warps(int64_t(top) << 32 | low, [](int64_t a, int64_t b) { return a > b ? a : b; });
  }
  __device__ uint64_t any(uint64_t v, int bits = 64) {
    const uint64_t high = bits > 32 ? __reduce_or_sync(kAll, static_cast<uint32_t>(v >> 32)) : 0;
    const uint64_t low = __reduce_or_sync(kAll, static_cast<uint32_t>(v));
    return over_warps(static_cast<int64_t>(high << 32 | low), [](int64_t a, int64_t b) { return a | b; });
  }
  __device__ bool any_lane(bool b) const {
    if constexpr (kWarps > 1) return __syncthreads_or(b);
    sync();  // a vote orders no memory
    return __ballot_sync(kAll, b) != 0;
  }
  __device__ int32_t add(int32_t* p, int32_t v) const { return atomicAdd(p, v); }

  // A lane scans the same elements that it reads, so the tiles need no barrier of their own.
  __device__ int32_t scan(int32_t* data, int n) {
    int32_t before = 0;
#pragma unroll 1
    for (int first = 0; first < n; first += kLanes) {
      const int i = first + rank();
      const int32_t v = i < n ? data[i] : 0;
      int32_t total;
      const int32_t here = before_me(v, total);
      if (i < n) data[i] = before + here;
      before += total;
    }
    sync();
    return before;
  }

  // The sum of v over the lanes before this one; total: over all. A barrier, but for a warp alone.
  __device__ int32_t before_me(int32_t v, int32_t& total) {
    int32_t upto = v;
    for (int far = 1; far < 32; far *= 2) {
      const int32_t other = __shfl_up_sync(kAll, upto, far);
      if (lane() >= far) upto += other;
    }
    if constexpr (kWarps == 1) {
      total = __shfl_sync(kAll, upto, 31);
      return upto - v;
    }
    const int64_t* partial = publish(__shfl_sync(kAll, upto, 31));
    int32_t before = 0;
    total = 0;
    if constexpr (kWarps > 8) {  // a lane per warp, where one lane would read many
      const int32_t here = lane() < kWarps ? static_cast<int32_t>(partial[lane()]) : 0;
      before = __reduce_add_sync(kAll, lane() < warp() ? here : 0);
      total = __reduce_add_sync(kAll, here);
    } else {
      for (int w = 0; w < kWarps; ++w) {
        const int32_t here = static_cast<int32_t>(partial[w]);
        before += w < warp() ? here : 0;
        total += here;
      }
    }
    return before + upto - v;
  }

 private:
  static constexpr unsigned kAll = 0xffffffffu;
  __device__ int lane() const { return threadIdx.x % 32; }
  __device__ int warp() const { return threadIdx.x / 32; }

  // Lanes take what is narrow, from the first on, warps what is wide, from the last on.
  template <class Wide, class F, class G>
  __device__ int by_width(int n, int most, Wide&& wide, F&& f, G&& g) const {
    Warp group;
    int before = 0;  // wide ones so far
    for (int first = 0; first < n; first += 32) {
      const int i = first + lane();
      const bool is_wide = i < n && wide(i);
      unsigned wide_ones = __ballot_sync(kAll, is_wide);
      for (; wide_ones; wide_ones &= wide_ones - 1, ++before) {
        const int at = first + __ffs(wide_ones) - 1;
        if (before == most) {
          n = at;
          break;
        }
        if (kWarps == 1 || kWarps - 1 - before % kWarps == warp()) g(at, group);
      }
      if ((kWarps == 1 || first / 32 % kWarps == warp()) && i < n && !is_wide) f(i);
    }
    return n;
  }

  // The largest v of the lanes that have one; has: whether this lane has it.
  __device__ static int32_t warp_max(int32_t v, bool& has) {
    const int32_t most = __reduce_max_sync(kAll, has ? v : INT32_MIN);
    has &= v == most;
    return most;
  }
  __device__ static int64_t warp_max(int64_t v, bool& has) {
    const int32_t high = warp_max(static_cast<int32_t>(v >> 32), has);
    const uint32_t low = __reduce_max_sync(kAll, has ? static_cast<uint32_t>(v) : 0u);
    has &= static_cast<uint32_t>(v) == low;
    return int64_t(high) << 32 | low;
  }

  // Every warp's v for all to read. One barrier is enough: a warp that runs ahead writes the other half, and
  // cannot come round to this half before everybody has left this reduction.
  __device__ const int64_t* publish(int64_t v) {
    int64_t* partial = group_->partial[odd_];
    odd_ ^= 1;
    if (lane() == 0) partial[warp()] = v;
    sync();
    return partial;
  }

  template <class Value, class Combine>
  __device__ Value over_warps(Value v, Combine&& combine) {
    if constexpr (kWarps == 1) {
      sync();  // shuffles order no memory
      return v;
    } else {
      const int64_t* partial = publish(v);
      v = static_cast<Value>(partial[0]);
      for (int w = 1; w < kWarps; ++w) v = combine(v, static_cast<Value>(partial[w]));
      return v;
    }
  }

  Group* group_;
  int odd_ = 0;
};

}  // namespace isoload
