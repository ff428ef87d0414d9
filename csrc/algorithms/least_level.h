// least_level: the least cost level at which ranks of unequal speed have room for so many copies.
//
// What ranks can carry grows with the level nearly as a line does: a copy more per sum of 1 / ticks. So a
// guess on that line, in a double, is a few copies off, and each further one is laid through what the last
// one found. Between two multiples of ranks' ticks nothing changes, hence a guess also moves the end of the
// range it is in to the next such multiple. Which guesses are made decides how soon the range is empty, never
// where.
#pragma once

#include <cstdint>

#include "algorithms/quotient.h"
#include "host_device.h"

namespace isoload {

struct LevelProblem {
  int n;                 // ranks
  const int32_t* ticks;  // [n] cost of a copy, 1..2^20, or null: all 1
  int64_t low;           // the least level that may be the answer
  int64_t all, wanted;   // copies: those that the ranks carry at the answer, and of them those that need room
};

// is_in(i): whether rank i takes part. room(i, copies): how many of the wanted copies it takes when its level
// pays for so many; it does not fall, and at `all` copies a rank there is room for all that are wanted.
template <class Team, class IsIn, class Room>
ISOLOAD_HD ISOLOAD_COLD int64_t least_level(Team& team, const LevelProblem& of, IsIn&& is_in, Room&& room) {
  constexpr int kGuesses = 8;                  // then halves, should the line mislead
  constexpr int64_t kUnit = int64_t(1) << 50;  // a level whose copies per rank add up to 2^60 at most
  auto ticks = [&](int i) { return of.ticks ? of.ticks[i] : 1; };
  int64_t paid = 0;
  team.for_each(of.n, [&](int i) { paid += is_in(i) ? quotient(kUnit, ticks(i)) : 0; });
  const double per_copy = static_cast<double>(kUnit) / static_cast<double>(team.sum(paid));

  int64_t low = of.low, high = of.all << 20;
  high = high > low ? high : low;
  int64_t guess = static_cast<int64_t>(static_cast<double>(of.all) * per_copy);
  for (int k = 0; low < high; ++k) {
    int64_t level = k < kGuesses ? guess : low + (high - low) / 2;
    level = level < low ? low : level < high ? level : high - 1;
    int64_t here = 0, before = low, after = high;  // the multiples next to the level
    team.for_each(of.n, [&](int i) {
      if (!is_in(i)) return;
      const int64_t copies = of.ticks ? quotient(level, ticks(i)) : level, multiple = copies * ticks(i);
      here += room(i, copies);
      before = multiple > before ? multiple : before;
      after = multiple + ticks(i) < after ? multiple + ticks(i) : after;
    });
    here = team.sum(here);
    const bool enough = here >= of.wanted;
    const int64_t next = team.max(enough ? before : -after);
    enough ? high = next : low = -next;
    guess = level + static_cast<int64_t>(static_cast<double>(of.wanted - here) * per_copy);
  }
  return low;
}

}  // namespace isoload
