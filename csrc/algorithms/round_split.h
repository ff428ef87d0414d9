// round_split: whole copies from a real-valued split, every expert's adding up to its load.
//
// Largest remainder: each replica gets the whole part of its split, and the copies still missing go one each
// to the largest fractions (ties to the lowest slot). A split that is off by its dtype's rounding is met as
// nearly as the load permits: no replica starts with more than is left, and what is missing beyond one copy
// each is dealt evenly.
#pragma once

#include <climits>
#include <cstdint>

#include "algorithms/replica_tables.h"
#include "host_device.h"
#include "planner.h"

namespace isoload {

template <class Real>
struct RoundingProblem : SplitProblem {
  const Real* split;  // [P] copies per slot
};

template <class Real, class Team>
class Rounding {
 public:
  ISOLOAD_HD Rounding(Team& team, const RoundingProblem<Real>& problem, int32_t* quota)
      : team_(team), in_(problem), t_(problem.tables), quota_(quota) {}

  // False if the loads cannot be planned: negative, 2^31 copies or more, or of an expert without a replica.
  ISOLOAD_HD bool run() {
    team_.for_each(in_.R * in_.S, [&](int p) { quota_[p] = 0; });
    team_.sync();
    int64_t copies = 0;
    uint64_t wrong = 0;
    team_.for_each(in_.E, [&](int e) {
      int64_t load = 0;
      for (int s = 0; s < in_.num_sources; ++s) {
        const int32_t part = in_.loads[int64_t(s) * in_.E + e];
        wrong |= part < 0;
        load += part;
      }
      wrong |= load > 0 && t_.copies(e) == 0;
      copies += load;
      if (!wrong && load > 0 && load <= INT32_MAX) round(e, load);
    });
    return !team_.any(wrong) && team_.sum(copies) <= INT32_MAX;
  }

 private:
  ISOLOAD_HD void round(int e, int64_t load) {
    const int first = t_.offsets[e], last = t_.offsets[e + 1];
    int64_t left = load;
    for (int j = first; j < last; ++j) {
      const int64_t whole = whole_part(j, left);
      quota_[t_.slots[j]] = static_cast<int32_t>(whole);
      left -= whole;
    }
    const int64_t each = left / (last - first);
    for (int j = first; each > 0 && j < last; ++j) quota_[t_.slots[j]] += static_cast<int32_t>(each);
    int given = -1;
    for (left -= each * (last - first); left > 0; --left) {
      given = next(first, last, given);
      ++quota_[t_.slots[given]];
    }
  }

  // In integers: as a float, `most` might be another number.
  ISOLOAD_HD int64_t whole_part(int j, int64_t most) const {
    const int64_t whole = in_range(j) ? static_cast<int64_t>(in_.split[t_.slots[j]]) : INT32_MAX;
    return whole < most ? whole : most;
  }

  // Exact: what a float has behind the point is a float.
  ISOLOAD_HD Real fraction(int j) const {
    const Real split = in_.split[t_.slots[j]];
    return in_range(j) ? split - static_cast<Real>(static_cast<int64_t>(split)) : 0;
  }

  ISOLOAD_HD bool in_range(int j) const {
    const Real split = in_.split[t_.slots[j]];
    return split >= 0 && split < Real(1 << 30) * 2;
  }

  // The replica with the next smaller fraction, or an equal one and a higher slot.
  ISOLOAD_HD int next(int first, int last, int given) const {
    int best = -1;
    for (int j = first; j < last; ++j) {
      const bool open =
          given < 0 || fraction(j) < fraction(given) || (fraction(j) == fraction(given) && j > given);
      if (open && (best < 0 || fraction(j) > fraction(best))) best = j;
    }
    return best;
  }

  Team& team_;
  const RoundingProblem<Real>& in_;
  const ReplicaTables t_;
  int32_t* const quota_;
};

template <class Real>
struct RoundingPlanner : PlannerOf<RoundingProblem<Real>, int32_t*> {  // see planner.h; [P]
  using Problem = RoundingProblem<Real>;

  ISOLOAD_HD static void select(Problem& in, int32_t*& out, int64_t b) {
    const int64_t P = int64_t(in.R) * in.S;
    in.SplitProblem::select(b);
    in.split += b * P;
    out += b * P;
  }
  template <int W>
  ISOLOAD_HD static int64_t bytes(const Problem&) {
    return 0;
  }
  template <int W, class Team>
  ISOLOAD_HD static int solve(Team& team, const Problem& in, void*, int32_t* out) {
    return Rounding<Real, Team>(team, in, out).run() ? kPlanned : 0;
  }
  template <class Team>
  ISOLOAD_HD static void refuse(Team& team, const Problem& in, int32_t* out) {
    team.for_each(in.R * in.S, [&](int p) { out[p] = 0; });
  }
};

}  // namespace isoload
