// What the planners make of one instance, and what is wrong with it.
#pragma once

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "algorithms/plan_active.h"
#include "algorithms/plan_exact.h"
#include "algorithms/plan_lp.h"
#include "algorithms/plan_waterfill.h"
#include "algorithms/replica_tables.h"
#include "algorithms/round_split.h"
#include "algorithms/share.h"
#include "algorithms/spare_fill.h"
#include "filling.h"
#include "instances.h"
#include "own.h"

namespace isoload {

using Buffer = std::vector<int32_t>;

struct SolvedPlan {
  bool planned;
  int64_t certificate[2];  // peak, bound
  int32_t telemetry[4];
  Buffer quota;  // [P]

  int64_t peak() const { return certificate[0]; }
  int64_t bound() const { return certificate[1]; }
  bool ok() const { return planned; }
  bool operator==(const SolvedPlan&) const = default;
};

// The real-valued plan and its rounding, as words: equal means the same bits.
template <class Real>
struct RelaxedPlan {
  Buffer words;   // [P] split, primal, dual as Real; iterations, status; [P] quota
  bool ok, fits;  // whether plan_lp, round_split took the problem

  static int64_t size(int64_t P) { return (P + 2) * int64_t(sizeof(Real) / 4) + 2 + P; }
  Real* split() { return reinterpret_cast<Real*>(words.data()); }
  const Real* split() const { return reinterpret_cast<const Real*>(words.data()); }
  int32_t* numbers(int P) { return reinterpret_cast<int32_t*>(split() + P + 2); }
  const int32_t* numbers(int P) const { return reinterpret_cast<const int32_t*>(split() + P + 2); }
  bool operator==(const RelaxedPlan& other) const {
    return ok == other.ok && fits == other.fits && (!ok || words == other.words);
  }
};

struct Answers {
  static constexpr int kCut = 3;  // plans[0..2] are exact, with rank sets of 1, 2 and 4 words
  Buffer tables, workspace;
  std::array<SolvedPlan, 4> plans;
  std::array<Buffer, 6>
      shares;  // all rows [R, P], one row [P], all ranks [R, R], by locality; then rank major
  std::array<bool, 6> shared;
  SolvedPlan active;  // peak and bound count slots
  Buffer own;         // [P] what in.row sends by its own counts
  RelaxedPlan<float> relaxed;
  RelaxedPlan<double> relaxed_double;
  bool diverged;  // a lane returned or saw something else than the others

  static bool fits(const Instance& in, int i) { return in.R <= 64 << i; }
  const SolvedPlan& exact() const { return plans[2]; }

  // Fresh memory full of `byte`: a result must not depend on what was there. Exact sizes, for
  // AddressSanitizer.
  void poison(const Instance& in, int byte) {
    auto fill = [&](Buffer& buffer, int64_t words) {
      buffer = Buffer(words);
      std::memset(buffer.data(), byte, words * sizeof(int32_t));
    };
    auto fill_plan = [&](SolvedPlan& plan) {
      std::memset(plan.certificate, byte, sizeof plan.certificate);
      std::memset(plan.telemetry, byte, sizeof plan.telemetry);
      fill(plan.quota, in.P());
    };
    fill(tables, ReplicaTables::size(in.E, in.P()));
    fill(workspace,
         std::max(
             {2 * replica_tables_workspace(in.R, in.E), ActiveWorkspace<4>::bytes(in.R, in.E) / 4,
              (std::max({fits(in, 0) ? WaterfillWorkspace<1>::bytes(in.R) : 0,
                         fits(in, 1) ? WaterfillWorkspace<2>::bytes(in.R) : 0,
                         WaterfillWorkspace<4>::bytes(in.R)}) +
               3) /
                  4,
              2 * (int64_t(in.R) * in.E + in.P()),
              LevelFillWorkspace::bytes(in.R, in.E, int64_t(in.R) * (in.S + kMostSpare), kMostSpare) / 4 + 1,
              FillWorkspace::bytes(in.R, in.E) / 4, LpWorkspace<double>::size(in.R, in.E, in.P()) / 4}));
    fill(relaxed.words, RelaxedPlan<float>::size(in.P()));
    fill(relaxed_double.words, RelaxedPlan<double>::size(in.P()));
    relaxed.ok = relaxed.fits = relaxed_double.ok = relaxed_double.fits = false;
    for (SolvedPlan& plan : plans) fill_plan(plan);
    fill_plan(active);
    fill(own, in.P());
    for (int i = 0; i < 6; ++i) fill(shares[i], i % 3 == 1 ? in.P() : in.R * (i % 3 ? in.R : in.P()));
    diverged = false;
  }
};

// The peak once in.pour copies are on the ranks too, each where it costs least: the lowest level with room.
inline int64_t peak_when_poured(const Instance& in, const std::vector<int64_t>& load) {
  auto tick = [&](int r) { return int64_t(in.ticks.empty() ? 1 : in.ticks[r]); };
  int64_t low = 0, high = 0;
  for (int r = 0; r < in.R; ++r) low = std::max(low, load[r] * tick(r));
  const int64_t pour = in.pour.empty() ? 0 : in.pour[0];
  for (high = low + pour * tick(0); low < high;) {
    const int64_t level = low + (high - low) / 2;
    int64_t room = 0;
    for (int r = 0; r < in.R; ++r) room += level / tick(r) - load[r];
    if (room >= pour)
      high = level;
    else
      low = level + 1;
  }
  return low;
}

// Conservation and the certificate of plans[i].
inline const char* plan_error(const Instance& in, const Answers& got, int i) {
  const SolvedPlan& plan = got.plans[i];
  const ReplicaTables t = ReplicaTables::at(got.tables.data(), in.E, in.P());
  std::vector<int64_t> load(in.R), taken(in.E);
  for (int r = 0; r < in.R; ++r) load[r] = in.fixed.empty() ? 0 : in.fixed[r];
  for (int e = 0; e < in.E; ++e)
    for (int j = t.offsets[e]; j < t.offsets[e + 1]; ++j) {
      const int32_t n = plan.quota[t.slots[j]];
      if (n < 0) return "a quota is negative";
      if (in.slot_to_expert[t.slots[j]] != e) return "the tables list a slot under another expert";
      load[t.slots[j] / in.S] += n;
      taken[e] += n;
    }
  int64_t everywhere = 0, listed = 0;
  for (int e = 0; e < in.E; ++e) {
    if (taken[e] != in.summed[e]) return "quotas do not add up to the loads";
    listed += taken[e];
  }
  for (const int32_t n : plan.quota) everywhere += n;
  if (everywhere != listed) return "a slot without a replica has a quota";
  const int64_t peak = peak_when_poured(in, load);
  if (plan.peak() != peak) return "peak is not the largest rank load";
  const bool cut = i == Answers::kCut;
  if (!cut && plan.bound() != peak) return "peak and bound differ at tolerance 0";
  if (plan.bound() > got.exact().peak()) return "a bound is above the optimum";
  if (peak < got.exact().peak()) return "a solve that was cut short beats the optimum";
  if (cut && !plan.telemetry[3] && peak > plan.bound() * (1 + in.tolerance_ppm * 1e-6L))
    return "peak is outside the tolerance";
  return nullptr;
}

// shares[i] of all rows, [i + 1] of one, [i + 2] by rank: sources send their loads, slots receive their
// quota.
inline const char* share_error(const Instance& in, const Answers& got, int i) {
  const Buffer &all = got.shares[i], &row = got.shares[i + 1], &ranks = got.shares[i + 2];
  if (!got.shared[i] || !got.shared[i + 1] || !got.shared[i + 2]) return "share refuses the plan";
  if (!std::equal(row.begin(), row.end(), all.begin() + in.row * in.P()))
    return "one row differs from all rows";
  for (int s = 0; s < in.R; ++s)
    for (int d = 0; d < in.R; ++d) {
      const auto first = all.begin() + s * in.P() + d * in.S;
      if (std::accumulate(first, first + in.S, 0) != ranks[s * in.R + d])
        return "a rank's copies are not its slots'";
    }
  std::vector<int64_t> received(in.P());
  for (int s = 0; s < in.R; ++s) {
    std::vector<int64_t> sent(in.E);
    for (int p = 0; p < in.P(); ++p) {
      const int32_t n = all[s * in.P() + p];
      if (n < 0 || (n > 0 && in.slot_to_expert[p] < 0)) return "a share is negative or goes to an empty slot";
      if (n > 0) sent[in.slot_to_expert[p]] += n;
      received[p] += n;
    }
    if (!std::equal(sent.begin(), sent.end(), in.loads.begin() + s * in.E))
      return "a source does not send its loads";
  }
  if (!std::equal(received.begin(), received.end(), got.exact().quota.begin()))
    return "a slot does not receive its quota";
  return nullptr;
}

// Every expert in one slot, no rank above the proved number of slots.
inline const char* active_error(const Instance& in, const Answers& got) {
  const SolvedPlan& plan = got.active;
  std::vector<int32_t> taken(in.E), slots(in.R);
  for (int p = 0; p < in.P(); ++p) {
    const int e = in.slot_to_expert[p];
    if (e < 0 && plan.quota[p]) return "an empty slot takes copies";
    if (e < 0 || plan.quota[p] == 0) continue;
    if (taken[e]) return "an expert is active in two slots";
    taken[e] = plan.quota[p];
    ++slots[p / in.S];
  }
  if (taken != in.summed) return "active slots do not hold the loads";
  const int64_t peak = *std::max_element(slots.begin(), slots.end());
  if (plan.peak() != peak) return "the active peak is not the most slots of a rank";
  return plan.bound() == peak ? nullptr : "the active peak and bound differ";
}

// Conservation, the order of the certificate, and a true status.
template <class Real>
const char* relaxed_error(const Instance& in, const Answers& got, const RelaxedPlan<Real>& plan) {
  if (!plan.ok) return nullptr;
  if (!plan.fits) return "round_split refuses what plan_lp takes";
  const ReplicaTables t = ReplicaTables::at(got.tables.data(), in.E, in.P());
  const Real *split = plan.split(), primal = split[in.P()], dual = split[in.P() + 1];
  const int32_t *numbers = plan.numbers(in.P()), *quota = numbers + 2;
  const Real rounding = std::numeric_limits<Real>::epsilon() * (in.R + in.S + 8);
  for (int e = 0; e < in.E; ++e) {
    int64_t rounded = 0;
    double copies = 0;
    for (int j = t.offsets[e]; j < t.offsets[e + 1]; ++j) {
      rounded += quota[t.slots[j]];
      copies += split[t.slots[j]];
      if (!(split[t.slots[j]] >= 0) || quota[t.slots[j]] < 0) return "a split or its rounding is negative";
    }
    if (rounded != in.summed[e]) return "rounded splits do not add up to the loads";
    if (std::abs(copies - in.summed[e]) > rounding * in.summed[e]) return "splits do not add up to the loads";
  }
  if (dual > primal * (1 + rounding)) return "dual is above primal";
  const bool converged = primal - dual <= Real(in.tolerance_ppm * 1e-6) * primal;
  if (numbers[1] == 2 ? numbers[0] == 0 : (numbers[1] == 0) != converged) return "a status is not true";
  return nullptr;
}

// The first fault of the answers of one lane and of many, or null.
inline const char* answers_error(const Instance& in, const Answers& one, const Answers& many) {
  if (many.diverged) return "the lanes disagree";
  if (one.tables != many.tables) return "the tables of the two teams differ";
  for (int i = 0; i < 4; ++i) {
    if (!Answers::fits(in, i)) continue;
    if (one.plans[i].planned != many.plans[i].planned) return "the statuses of the two teams differ";
    if (!one.plans[i].ok()) continue;
    if (one.plans[i] != many.plans[i]) return "the plans of the two teams differ";
    if (!one.exact().ok()) continue;
    if (i != Answers::kCut && one.plans[i] != one.exact()) return "plans differ between widths of rank sets";
    if (const char* wrong = plan_error(in, one, i)) return wrong;
  }
  if (one.relaxed != many.relaxed || one.relaxed_double != many.relaxed_double)
    return "the real-valued plans of the two teams differ";
  if (const char* wrong = relaxed_error(in, one, one.relaxed)) return wrong;
  if (const char* wrong = relaxed_error(in, one, one.relaxed_double)) return wrong;
  if (!one.exact().ok()) return nullptr;
  if (one.active != many.active) return "the active plans of the two teams differ";
  if (one.own != many.own) return "the splits of own counts of the two teams differ";
  if (const char* wrong = active_error(in, one)) return wrong;
  if (const char* wrong = own_error(in, one.own)) return wrong;
  if (one.shares != many.shares || one.shared != many.shared) return "the shares of the two teams differ";
  const char* wrong = share_error(in, one, 0);
  return wrong ? wrong : share_error(in, one, 3);
}

}  // namespace isoload
