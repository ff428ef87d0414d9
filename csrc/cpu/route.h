// route and route_sampled on one core.
#pragma once

#include <algorithm>
#include <cfloat>
#include <vector>

#include "cpu/cpu.h"
#include "cpu/route_shared.h"
#include "random_word.h"

namespace isoload::cpu {

template <class Id>
bool is_expert(Id id, int E) {
  return static_cast<uint64_t>(id) < static_cast<uint64_t>(E);
}

// The i-th copy of an expert goes to the first replica whose cumulative share exceeds i.
class Dealer {
 public:
  void reset(const ReplicaTables& tables, int E, const int32_t* share) {
    t_ = tables, share_ = share;
    hands_.resize(E);
    for (int e = 0; e < E; ++e) {
      hands_[e].next = t_.offsets[e];
      advance(e);
    }
  }
  int deal(int e) {  // -1: the share is used up
    const int p = hands_[e].slot;
    if (p >= 0 && --hands_[e].left == 0) advance(e);
    return p;
  }
  int undealt() const {  // an expert with copies to spare, or -1
    for (std::size_t e = 0; e < hands_.size(); ++e)
      if (hands_[e].slot >= 0) return static_cast<int>(e);
    return -1;
  }

 private:
  struct Hand {
    int32_t slot, left, next;  // replica now served, copies it still takes, index of its successor
  };
  void advance(int e) {
    Hand& hand = hands_[e];
    hand.slot = -1;
    while (hand.next < t_.offsets[e + 1] && hand.slot < 0) {
      const int p = t_.slots[hand.next++];
      if (share_[p] > 0) hand.slot = p, hand.left = share_[p];
    }
  }
  ReplicaTables t_;
  const int32_t* share_ = nullptr;
  std::vector<Hand> hands_;
};

// Deals copies [n] that lie side by side in order.
template <class Id>
RouteFault deal(const Id* ids, int64_t n, int E, Dealer& dealer, Id* slots) {
  for (int64_t i = 0; i < n; ++i) {
    const Id id = ids[i];
    slots[i] = -1;
    if (id == -1) continue;
    if (!is_expert(id, E)) return {RouteFault::bad_id, id};
    slots[i] = dealer.deal(static_cast<int>(id));
    if (slots[i] < 0) return {RouteFault::not_the_share, id};
  }
  return {};
}

// The copies' numbers are of no use here: a thread meets them in order.
template <class Id>
RouteFault deal_all(const Route& in, const Id* ids, Id* slots) {
  thread_local Dealer dealer;
  dealer.reset(in.tables, in.E, in.send_counts);
  const int n = in.shared.num_shared, home = in.home_slot();
  const int64_t run = n == 0 ? in.T * in.K : in.K, end = in.T * in.width();
  for (int64_t at = 0; at < end; at += run + n) {
    const RouteFault fault = deal(ids + at, run, in.E, dealer, slots + at);
    if (fault.kind != RouteFault::none) return fault;
    const bool present =
        n > 0 && std::any_of(slots + at, slots + at + run, [](Id slot) { return slot >= 0; });
    for (int j = 0; j < n; ++j) {
      const int64_t i = at + run + j;
      if (ids[i] != (present ? in.E + j : -1)) return {RouteFault::not_shared, at / in.width()};
      slots[i] = present && home >= 0 ? home + j : -1;
    }
  }
  if (const int e = dealer.undealt(); e >= 0) return {RouteFault::not_the_share, e};
  return {};
}

template <class Id>
ColumnsFault route(const Route& in, const Id* ids, Id* slots) {
  const RouteFault fault = deal_all(in, ids, slots);
  if (fault.kind != RouteFault::none || in.shared.source_quota == nullptr) return {fault, {}};
  return {fault, route_shared(in.shared, slots, slots + in.K)};
}

template <class Id>
RouteFault route_sampled(const Id* ids, int64_t n, int E, const ReplicaTables& t, const float* weights,
                         const Stream& words, Id* slots) {
  const uint64_t seed = words.key();
  for (int64_t i = 0; i < n; ++i) {
    const Id id = ids[i];
    slots[i] = -1;
    if (id == -1) continue;
    if (!is_expert(id, E)) return {RouteFault::bad_id, id};
    const int first = t.offsets[id], last = t.offsets[id + 1];
    float total = 0;
    for (int j = first; j < last; ++j) {
      const float weight = weights[t.slots[j]];
      if (!(weight >= 0 && weight <= FLT_MAX)) return {RouteFault::bad_weight, t.slots[j]};
      total += weight;
    }
    if (!(total > 0)) return {RouteFault::not_the_share, id};
    slots[i] = draw_slot(t, static_cast<int>(id), weights, total, random_word(seed, i));
  }
  return {};
}

}  // namespace isoload::cpu
