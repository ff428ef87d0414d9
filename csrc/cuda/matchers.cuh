// Who matches how many tokens in one block.
#pragma once

#include "cuda/match_bits.cuh"
#include "cuda/match_few.cuh"

namespace isoload::cuda {

template <bool kBits>
using MatcherOf = std::conditional_t<kBits, BitMatcher, FewMatcher>;

// f(whether by bits); none() where they are too many.
template <class F, class G>
auto with_matcher(const SharedRoute& in, F&& f, G&& none) {
  if (fits<FewMatcher>(in)) return f(std::false_type());
  return fits<BitMatcher>(in) ? f(std::true_type()) : none();
}

}  // namespace isoload::cuda
