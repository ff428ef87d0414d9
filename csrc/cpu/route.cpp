#include <algorithm>
#include <cfloat>

#include "cpu/cpu.h"
#include "cpu/dealer.h"
#include "random_word.h"

namespace isoload::cpu {
namespace {

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

}  // namespace

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
    // 24 bits of the word as a float in [0, 1): exact, so every device draws the same replica.
    float left = static_cast<float>(random_word(seed, i) >> 40) * 0x1p-24f * total;
    for (int j = first; j < last; ++j) {
      const float weight = weights[t.slots[j]];
      if (weight > 0) slots[i] = t.slots[j];  // rounding may leave a crumb after the last: it keeps that one
      if (left < weight) break;
      left -= weight;
    }
  }
  return {};
}

template ColumnsFault route(const Route&, const int32_t*, int32_t*);
template ColumnsFault route(const Route&, const int64_t*, int64_t*);
template RouteFault route_sampled(const int32_t*, int64_t, int, const ReplicaTables&, const float*,
                                  const Stream&, int32_t*);
template RouteFault route_sampled(const int64_t*, int64_t, int, const ReplicaTables&, const float*,
                                  const Stream&, int64_t*);

}  // namespace isoload::cpu
