// Team: the lanes that solve one problem together. An algorithm in csrc/algorithms is written once against
// this interface; every lane runs it, control flow is uniform, and shared data changes hands only at a sync.
//   rank(), size()        this lane, number of lanes
//   sync()                barrier; writes before it are visible after it
//   for_each(n, f)        f(i) for i in [0, n), split over the lanes (no barrier at the end)
//   sum/max/any(v)        reduction over the lanes, same result in all; also a barrier on both sides
//   any(v, bits)          the words' union, or that of their lowest `bits`, where the others are 0
//   any_lane(b)           whether a lane has it, as those
//   add(p, v)             integer add to shared memory from several lanes (order-free), returns the old value
//   for_each_by(n, wide, f, g)   f(i), by one lane, or where wide(i) g(i, group), by a group of lanes: a
//                         team whose rank() lies in it alone. No barrier at the end, nor any order in them
//   keep_by(n, wide, f, g)   for_each_by of the first i, as many as leave no lane and no group two; how many
//   for_each_group(n, f)  f(i, group) for i in [0, n), split over the groups (no barrier at the end)
//   groups(), group()     how many there are, and which of them this lane is in
//   Warp                  what a group is; its kLanes: how many lanes it has, 1 or 32
//   alone(f)              f(group) by the first group, while the others wait at a barrier. What f computes
//                         only lane 0 has for certain
//   column_sums(...)      sums down columns; a lane has those that for_each gives it
//   sum32(v), max32(v)    of 32 bits, a sum below 2^31; of a group without a barrier
//   lanes_with(b)         of a group: the lanes that have it, as bits
//   lanes_before(b, all)  of a group: how many lanes before this one have it, and how many of all
//   largest(n, f, at)     of a group: the largest f(i) of i in [0, n), n > 0, and the lowest i that has it
//   first(from, n, f)     of a group: the lowest i in [from, n) of which f is true, or n
//   from_lane_of(i, v)    of a group: v of the lane to which for_each gives i; no barrier in these four
//   scan(data, n)         data[0..n) becomes its exclusive prefix sum, the total is returned. A lane takes
//                         what for_each gives it: data from others needs a sync before. A barrier after it
#pragma once

#include <cstdint>

#include "host_device.h"

namespace isoload {

// What column_sums(rows, num_rows, n, sums) saw: sums [n] are those of rows [num_rows, n] modulo 2^32.
struct ColumnSums {
  int32_t any_row = 0, any_sum = 0;  // negative where a number is, and where a sum on the way there is
};

// One lane: plain loops, every synchronisation compiles to nothing.
struct SerialTeam {
  static constexpr int kLanes = 1;
  using Warp = SerialTeam;
  ISOLOAD_HD int rank() const { return 0; }
  ISOLOAD_HD int size() const { return 1; }
  ISOLOAD_HD void sync() const {}
  template <class F>
  ISOLOAD_HD void for_each(int n, F&& f) const {
    ISOLOAD_ROLLED
    for (int i = 0; i < n; ++i) f(i);
  }
  template <class Wide, class F, class G>
  ISOLOAD_HD void for_each_by(int n, Wide&& wide, F&& f, G&& g) const {
    for (int i = 0; i < n; ++i) wide(i) ? g(i, *this) : f(i);
  }
  template <class Wide, class F, class G>
  ISOLOAD_HD int keep_by(int, int, Wide&&, F&&, G&&) const {
    return 0;
  }
  ISOLOAD_HD int groups() const { return 1; }
  ISOLOAD_HD int group() const { return 0; }
  template <class F>
  ISOLOAD_HD void for_each_group(int n, F&& f) {
    for (int i = 0; i < n; ++i) f(i, *this);
  }
  template <class F>
  ISOLOAD_HD void alone(F&& f) {
    f(*this);
  }
  ISOLOAD_HD ColumnSums column_sums(const int32_t* rows, int num_rows, int n, int32_t* sums) const {
    ColumnSums seen;
    for (int i = 0; i < n; ++i) seen.any_row |= sums[i] = rows[i];
    for (int s = 1; s < num_rows; ++s) {
      const int32_t* row = rows + int64_t(s) * n;
      for (int i = 0; i < n; ++i) {
        seen.any_row |= row[i];
        seen.any_sum |= sums[i] = static_cast<int32_t>(uint32_t(sums[i]) + uint32_t(row[i]));
      }
    }
    return seen;
  }
  ISOLOAD_HD int32_t sum32(int32_t v) const { return v; }
  ISOLOAD_HD int32_t max32(int32_t v) const { return v; }
  ISOLOAD_HD uint32_t lanes_with(bool b) const { return b; }
  ISOLOAD_HD int32_t lanes_before(bool b, int32_t& total) const {
    total = b;
    return 0;
  }
  template <class F>
  ISOLOAD_HD auto largest(int n, F&& f, int& at) const {
    auto most = f(at = 0);
    for (int i = 1; i < n; ++i)
      if (const auto v = f(i); v > most) most = v, at = i;
    return most;
  }
  ISOLOAD_HD int from_lane_of(int, int v) const { return v; }
  template <class F>
  ISOLOAD_HD int first(int from, int n, F&& f) const {
    while (from < n && !f(from)) ++from;
    return from;
  }
  ISOLOAD_HD int64_t sum(int64_t v) const { return v; }
  ISOLOAD_HD int64_t max(int64_t v) const { return v; }
  ISOLOAD_HD uint64_t any(uint64_t v, int bits = 64) const { return v; }
  ISOLOAD_HD bool any_lane(bool b) const { return b; }
  ISOLOAD_HD int32_t add(int32_t* p, int32_t v) const {
    int32_t old = *p;
    *p = old + v;
    return old;
  }
  ISOLOAD_HD int32_t scan(int32_t* data, int n) const {
    int32_t total = 0;
    for (int i = 0; i < n; ++i) {
      int32_t v = data[i];
      data[i] = total;
      total += v;
    }
    return total;
  }
};

}  // namespace isoload

// ThreadTeam needs C++20; torch's extensions are C++17 and nvcc has its own team.
#if __cplusplus >= 202002L && !defined(__CUDACC__)

#include <algorithm>
#include <atomic>
#include <barrier>
#include <numeric>
#include <vector>

namespace isoload {

// One lane of N threads that solve a problem together, as a CUDA block does. It synchronises no more than the
// interface promises: an algorithm that lacks a barrier races, and ThreadSanitizer sees it without a GPU.
class ThreadTeam {
 public:
  using Warp = SerialTeam;
  // What the lanes share. std::barrier puts waiting lanes to sleep, so there may be more lanes than cores.
  struct Group {
    explicit Group(int lanes) : barrier(lanes), partial(2 * lanes) {}
    std::barrier<> barrier;
    std::vector<int64_t> partial;  // [2, lanes] operands of this reduction and of the one before
  };

  ThreadTeam(Group& group, int rank)
      : group_(group), rank_(rank), size_(static_cast<int>(group.partial.size() / 2)) {}

  int rank() const { return rank_; }
  int size() const { return size_; }
  void sync() { group_.barrier.arrive_and_wait(); }
  template <class F>
  void for_each(int n, F&& f) const {
    for (int i = rank_; i < n; i += size_) f(i);
  }
  template <class Wide, class F, class G>
  void for_each_by(int n, Wide&& wide, F&& f, G&& g) const {
    const SerialTeam group;
    for_each(n, [&](int i) { wide(i) ? g(i, group) : f(i); });
  }
  template <class Wide, class F, class G>
  int keep_by(int n, int, Wide&& wide, F&& f, G&& g) const {
    for_each_by(n = std::min(n, size_), wide, f, g);
    return n;
  }
  int groups() const { return size_; }
  int group() const { return rank_; }
  template <class F>
  void for_each_group(int n, F&& f) const {
    SerialTeam group;
    for_each(n, [&](int i) { f(i, group); });
  }
  template <class F>
  void alone(F&& f) {
    SerialTeam group;
    if (rank_ == 0) f(group);
    sync();
  }
  ColumnSums column_sums(const int32_t* rows, int num_rows, int n, int32_t* sums) const {
    ColumnSums seen;
    for_each(n, [&](int i) {
      uint32_t sum = 0;
      for (int s = 0; s < num_rows; ++s) {
        const int32_t v = rows[int64_t(s) * n + i];
        sum += static_cast<uint32_t>(v);
        seen.any_row |= v, seen.any_sum |= static_cast<int32_t>(sum);
      }
      sums[i] = static_cast<int32_t>(sum);
    });
    return seen;
  }
  int32_t sum32(int32_t v) { return static_cast<int32_t>(sum(v)); }
  int32_t max32(int32_t v) { return static_cast<int32_t>(max(v)); }
  int64_t sum(int64_t v) {
    return reduce(v, [](int64_t a, int64_t b) { return a + b; });
  }
  int64_t max(int64_t v) {
    return reduce(v, [](int64_t a, int64_t b) { return a > b ? a : b; });
  }
  uint64_t any(uint64_t v, int bits = 64) {
    return reduce(static_cast<int64_t>(v), [](int64_t a, int64_t b) { return a | b; });
  }
  bool any_lane(bool b) { return any(b) != 0; }
  int32_t add(int32_t* p, int32_t v) const {
    return std::atomic_ref<int32_t>(*p).fetch_add(v, std::memory_order_relaxed);
  }
  int32_t scan(int32_t* data, int n) {
    int64_t before = 0;
    for (int first = 0; first < n; first += size_) {
      const int i = first + rank_;
      const int64_t* partial = publish(i < n ? data[i] : 0);
      if (i < n) data[i] = static_cast<int32_t>(std::accumulate(partial, partial + rank_, before));
      before = std::accumulate(partial, partial + size_, before);
    }
    sync();
    return static_cast<int32_t>(before);
  }

 private:
  // Every lane's v for all to read. One barrier is enough: a lane that runs ahead writes the other half, and
  // cannot come round to this half before everybody has left this reduction.
  const int64_t* publish(int64_t v) {
    int64_t* partial = group_.partial.data() + (odd_ ? size_ : 0);
    odd_ = !odd_;
    partial[rank_] = v;
    sync();
    return partial;
  }

  template <class Combine>
  int64_t reduce(int64_t v, Combine&& combine) {
    const int64_t* partial = publish(v);
    v = partial[0];
    for (int i = 1; i < size_; ++i) v = combine(v, partial[i]);
    return v;
  }

  Group& group_;
  const int rank_, size_;
  bool odd_ = false;
};

}  // namespace isoload

#endif
