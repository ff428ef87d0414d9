// Team: the lanes that solve one problem together. An algorithm in csrc/algorithms is written once against
// this interface; every lane runs it, control flow is uniform, and shared data changes hands only at a sync.
//   rank(), size()        this lane, number of lanes
//   sync()                barrier; writes before it are visible after it
//   for_each(n, f)        f(i) for i in [0, n), split over the lanes (no barrier at the end)
//   sum/max/any(v)        reduction over the lanes, same result in all; also a barrier on both sides
//   add(p, v)             integer add to shared memory from several lanes (order-free), returns the old value
//   scan(data, n)         data[0..n) becomes its exclusive prefix sum, the total is returned; a barrier after
//   it,
//                         so data from other lanes needs a sync before it
#pragma once

#include <cstdint>

namespace isoload {

// One lane: plain loops, every synchronisation compiles to nothing.
struct SerialTeam {
  int rank() const { return 0; }
  int size() const { return 1; }
  void sync() const {}
  template <class F>
  void for_each(int n, F&& f) const {
    for (int i = 0; i < n; ++i) f(i);
  }
  int64_t sum(int64_t v) const { return v; }
  int64_t max(int64_t v) const { return v; }
  uint64_t any(uint64_t v) const { return v; }
  int32_t add(int32_t* p, int32_t v) const {
    int32_t old = *p;
    *p = old + v;
    return old;
  }
  int32_t scan(int32_t* data, int n) const {
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

#include <atomic>
#include <barrier>
#include <vector>

namespace isoload {

// One lane of N threads that solve a problem together, as a CUDA block does. It synchronises no more than the
// interface promises: an algorithm that lacks a barrier races, and ThreadSanitizer sees it without a GPU.
class ThreadTeam {
 public:
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
  int64_t sum(int64_t v) {
    return reduce(v, [](int64_t a, int64_t b) { return a + b; });
  }
  int64_t max(int64_t v) {
    return reduce(v, [](int64_t a, int64_t b) { return a > b ? a : b; });
  }
  uint64_t any(uint64_t v) {
    return reduce(static_cast<int64_t>(v), [](int64_t a, int64_t b) { return a | b; });
  }
  int32_t add(int32_t* p, int32_t v) const {
    return std::atomic_ref<int32_t>(*p).fetch_add(v, std::memory_order_relaxed);
  }
  int32_t scan(int32_t* data, int n) { return sum(rank_ == 0 ? SerialTeam().scan(data, n) : 0); }

 private:
  // One barrier is enough: a lane that runs ahead writes the other half, and cannot come round to this half
  // before everybody has left this reduction.
  template <class Combine>
  int64_t reduce(int64_t v, Combine&& combine) {
    int64_t* partial = group_.partial.data() + (odd_ ? size_ : 0);
    odd_ = !odd_;
    partial[rank_] = v;
    sync();
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
