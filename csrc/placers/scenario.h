// Local search on the mean over scenarios of the busiest rank. python/isoload/reference/place_scenario.py finds the
// same slots.
#pragma once

#include "placers/level.h"
#include "placers/start.h"
#include "placers/swaps.h"

namespace isoload::placers {

class Search {
 public:
  Search(Layout& layout, int steps) : layout_(layout), problem_(*layout.problem), steps_(steps) {}

  // Exchanges, rank by rank among the busiest, until none helps or the steps are used up. Returns the objective.
  double run() {
    if (problem_.exact) relevel(kFirstSweeps);
    double now = layout_.objective();
    for (bool better = true; better && steps_ > 0;) {
      better = false;
      for (int i = 0; i < problem_.ranks && steps_ > 0; ++i) {
        Judge judge(layout_);
        if (!judge.is_critical(i)) continue;
        for (const Change& change : best_exchanges(judge, i)) {
          --steps_;
          const double then = attempt(change, now);
          if (then >= now) continue;
          now = then, better = true;
          break;
        }
      }
      if (!better) better = repoint(now);
    }
    return now;
  }

 private:
  static constexpr int kFirstSweeps = 24, kSweeps = 4, kTries = 3;

  void relevel(int sweeps) { level(layout_, sweeps, replicated_slots(layout_)); }

  // The exchanges with rank i that promise most, best first (ties: lowest p, then q).
  std::vector<Change> best_exchanges(Judge& judge, int i) {
    std::vector<Change> best;
    const size_t most = problem_.exact ? kTries : 1;
    judge.choose_rank(i);
    for (int j = 0; j < problem_.ranks; ++j) {
      if (j == i) continue;
      judge.choose_other(j);
      for (int p = i * problem_.width; p < i * problem_.width + problem_.capacity[i]; ++p) {
        const int a = layout_.slot[p];
        if (!may_move(layout_, a, i, j)) continue;
        for (int q = j * problem_.width; q < j * problem_.width + problem_.capacity[j]; ++q) {
          const int b = layout_.slot[q];
          if (a == b || !may_move(layout_, b, j, i)) continue;
          const double gain = judge.now() - judge.after(p, q);
          if (gain <= 0 || (best.size() == most && gain <= best.back().gain)) continue;
          if (best.size() == most) best.pop_back();
          auto place = best.end();
          while (place != best.begin() && (place - 1)->gain < gain) --place;
          best.insert(place, Change{gain, p, q, -1});
        }
      }
    }
    return best;
  }

  // Makes a change if it lowers the objective, and returns the objective.
  double attempt(const Change& change, double now) {
    if (!problem_.exact) {
      exchange(layout_, change.p, change.q);
      return now - change.gain;
    }
    saved_share_ = layout_.share, saved_load_ = layout_.rank_load;
    exchange(layout_, change.p, change.q);
    relevel(kSweeps);
    const double then = layout_.objective();
    if (then < now) return then;
    exchange(layout_, change.p, change.q);
    layout_.share = saved_share_, layout_.rank_load = saved_load_;
    return now;
  }

  bool repoint(double& now) {
    (void)now;
    return false;
  }

  Layout& layout_;
  const Problem& problem_;
  int steps_;
  std::vector<double> saved_share_, saved_load_;
};

}  // namespace isoload::placers
