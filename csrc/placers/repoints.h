// Changes of one slot: it is empty, or holds a replica that is not needed, and gets a replica of another
// expert.
#pragma once

#include "placers/exchanges.h"

namespace isoload::placers {

// Whether slot p may lose its expert.
inline bool may_drop(const Layout& layout, int p) {
  const int x = layout.slot[p];
  if (x < 0) return true;
  if (layout.copies[x] < 2) return false;
  return may_leave(layout, x, layout.rank_of(p));
}

// Split evenly: the objective after slot p's expert becomes y.
class EvenTurn {
 public:
  explicit EvenTurn(const Layout& layout) : layout_(layout) {}

  double after(int p, int y) {
    load_ = layout_.rank_load;
    const int r = layout_.rank_of(p), x = layout_.slot[p];
    if (x >= 0) {
      change_parts(x, layout_.copies[x] - 1, r);
      add(r, layout_.share_of(p), -1);
    }
    const std::vector<double> part = change_parts(y, layout_.copies[y] + 1, r);
    add(r, part.data(), 1);
    return objective_of(*layout_.problem, load_);
  }

 private:
  // Every copy of e but that on `without` carries a part of 1/n; returns it.
  std::vector<double> change_parts(int e, int n, int without) {
    const Problem& problem = *layout_.problem;
    std::vector<double> part(problem.scenarios), more(problem.scenarios);
    const double* load = layout_.load_of(e);
    for (int s = 0; s < problem.scenarios; ++s) {
      part[s] = Layout::whole(load[s] / n);
      more[s] = part[s] - (layout_.copies[e] ? Layout::whole(load[s] / layout_.copies[e]) : 0);
    }
    for (int r = 0; r < problem.ranks; ++r) {
      if (r != without && layout_.held(r, e)) add(r, more.data(), 1);
    }
    return part;
  }

  void add(int r, const double* row, double sign) {
    double* load = row_of(load_, r, layout_.problem->scenarios);
    for (int s = 0; s < layout_.problem->scenarios; ++s) load[s] += sign * row[s];
  }

  const Layout& layout_;
  std::vector<double> load_;  // [R, n]
};

// Exact split: what a replica would take from the bottleneck, less what the replica that it replaces gives
// back to it. An estimate; the search levels the most promising changes.
class Relief {
 public:
  Relief(const Layout& layout, const Bottleneck& bottleneck)
      : layout_(layout),
        neck_(bottleneck),
        n_(layout.problem->scenarios),
        held_(static_cast<size_t>(layout.problem->experts) * n_),
        outside_(held_.size()),
        room_(n_),
        back_(n_) {
    for (int p = 0; p < static_cast<int>(layout.slot.size()); ++p) {
      const int e = layout.slot[p];
      if (e < 0) continue;
      const double *share = layout.share_of(p), *member = neck_.member_of(layout.rank_of(p));
      for (int s = 0; s < n_; ++s) {
        row_of(held_, e, n_)[s] += share[s] * member[s];
        row_of(outside_, e, n_)[s] += 1 - member[s];
      }
    }
  }

  // Slot p loses its expert: what its rank could then take, and what the bottleneck has to take back.
  void choose_slot(int p) {
    const int r = layout_.rank_of(p), x = layout_.slot[p];
    const double *own = layout_.share_of(p), *load = layout_.load_on(r), *member = neck_.member_of(r);
    const double tick = layout_.problem->tick[r];
    for (int s = 0; s < n_; ++s) {
      const bool takes = member[s] == 0;
      const bool alone = x >= 0 && row_of(outside_, x, n_)[s] <= 1;
      room_[s] = takes ? neck_.peak[s] / tick - load[s] + own[s] : 0;
      back_[s] = takes && alone ? own[s] : 0;
    }
  }

  // By how much the objective falls if expert y comes instead.
  double gain(int y) const {
    const double *held = row_of(held_, y, n_), *weight = layout_.problem->weight;
    return lane_sum(n_, [&](int64_t s) {
      return weight[s] * ((std::min(held[s], room_[s]) - back_[s]) * neck_.relief[s]);
    });
  }

 private:
  const Layout& layout_;
  const Bottleneck& neck_;
  int n_;
  std::vector<double> held_, outside_;  // [E, n] an expert's load inside the bottleneck, its copies outside
  std::vector<double> room_, back_;     // [n]
};

}  // namespace isoload::placers
