// A planner: an algorithm that solves one layer with one Team. Its struct says what the shells of csrc/cpu
// and csrc/cuda need to run it over a batch of layers, and nothing else is written per device:
//
//   Problem, Result      plain pointers: those of layer 0, the other layers follow without a gap
//   kSets                whether W, the words of a RankSet, follows from problem.R; else W is 1
//   select(in, out, b)   turns both into those of layer b
//   bytes<W>(in)         of one layer's workspace, any content
//   solve<W>(team, in, memory, out)   kPlanned, a barrier last; or at least 0: what was refused, in the
//                                     planner's own numbers, right behind a reduction
//   refuse(team, in, out)             what a refused layer leaves behind on a GPU, where nothing is raised
//
// And where a GPU's block brings its layer to shared memory, next to the workspace, if all fits there:
//
//   is_plain(in)           whether it is the usual problem, which has a kernel with less code
//   prepare<kPlain>(in)    states what is so in that kernel, or in both
//   fetched(in, out, take) take(array, n) of what is brought there, and of one result that leaves it at the
//   end;
//                          take(array, n, kOrNone) where the array may be null, and is n zeros then
#pragma once

#include <type_traits>

#include "rank_set.h"

namespace isoload {

// What a planner's struct begins with.
template <class P, class R, bool kOfRanks = false>
struct PlannerOf {
  using Problem = P;
  using Result = R;
  static constexpr bool kSets = kOfRanks;
};

constexpr int kPlanned = -1;
constexpr std::true_type kOrNone{};

// f(W): the number of words that the planner's sets of ranks take.
template <class Planner, class F>
auto with_words(const typename Planner::Problem& problem, F&& f) {
  if constexpr (Planner::kSets) {
    return with_words(problem.R, f);
  } else {
    return f(std::integral_constant<int, 1>());
  }
}

}  // namespace isoload
