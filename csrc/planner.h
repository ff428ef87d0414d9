// A planner: an algorithm that solves one layer with one Team. Its struct says what the shells of csrc/cpu
// and csrc/cuda need to run it over a batch of layers, and nothing else is written per device:
//
//   Problem, Result              plain pointers: those of layer 0, the other layers follow without a gap
//   kSets                        whether W, the words of a RankSet, follows from problem.R; else it is 1
//   layer(problem, b)            the problem of layer b; layer(problem, result, b) its result
//   bytes<W>(problem)            of one layer's workspace, any content
//   solve<W>(team, problem, memory, result)   kPlanned, or what was refused: at least 0, of the planner's
//   choice refuse(team, problem, result)             what a refused layer leaves behind on a GPU, which
//   raises nothing
#pragma once

#include <type_traits>

#include "rank_set.h"

namespace isoload {

constexpr int kPlanned = -1;

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
