// gather_rows: every rank's row to every rank, through memory that all of them write. A rank puts its row
// into every other rank's board, then the number of the round, and waits for theirs.
//
// A board has places for two rounds, and they are enough. A rank puts round n + 2 where round n lay once its
// own round n + 1 has ended, for which every rank has put a row of n + 1. A rank begins n + 1 when its round
// n has ended, with all rows copied out. So a rank's rounds must follow one another: on a GPU in one stream,
// and a kernel that is launched before the one ahead of it has ended waits for that before it calls this.
//
// Round numbers wrap. A place sees every second number only, and never one that is two ahead.
#pragma once

#include <cstdint>

#include "system_memory.h"
#include "team.h"

namespace isoload {

constexpr int kLineWords = 32;  // of a GPU's cache: what ranks write apart lies apart

// A board: its own rank's words, then [2, R] places by the round's parity and the row's rank.
struct Board {
  // This rank's words: rounds so far, and one more than the rank that came too late, or 0.
  enum Own { kRounds, kLate };

  // A place is the number of its round, then the row.
  ISOLOAD_HD static int64_t place_words(int W) { return int64_t(W / kLineWords + 1) * kLineWords; }
  ISOLOAD_HD static int64_t words(int R, int W) { return kLineWords + 2 * R * place_words(W); }
};

struct RowGather {
  const int32_t* row;     // [W]
  const int64_t* boards;  // [R] address of every rank's board, as this rank reaches it
  int32_t* own;           // this rank's board
  int R, W, rank;
  int64_t patience;  // nanoseconds until a rank is late

  // The place of rank r's row on a board.
  ISOLOAD_HD int32_t* place(int32_t* board, uint32_t round, int r) const {
    return board + kLineWords + (int64_t(round & 1) * R + r) * Board::place_words(W);
  }
  // The place of this rank's row on the i-th other rank's board. All ranks begin with another one.
  ISOLOAD_HD int32_t* there(uint32_t round, int i) const {
    const int r = rank + 1 + i < R ? rank + 1 + i : rank + 1 + i - R;
    return place(reinterpret_cast<int32_t*>(boards[r]), round, rank);
  }
};

struct Word {
  int32_t* to;
  int32_t value;
};

// Writes word(i) for i in [0, n). A lane makes a few before it writes them: no read is moved up behind a
// write.
template <class Team, class F>
ISOLOAD_HD void write_words(Team& team, int n, F&& word) {
  constexpr int kAhead = 8;
  const int64_t step = team.size();
  for (int64_t first = team.rank(); first < n; first += kAhead * step) {
    Word words[kAhead];
    for (int a = 0; a < kAhead; ++a)
      words[a] = word(static_cast<int>(first + a * step < n ? first + a * step : n - 1));
    for (int a = 0; a < kAhead; ++a)
      if (first + a * step < n) *words[a].to = words[a].value;
  }
}

template <class Team>
ISOLOAD_HD void put_row(Team& team, const RowGather& in, uint32_t round) {
  write_words(team, (in.R - 1) * in.W,
              [&](int i) { return Word{in.there(round, i / in.W) + 1 + i % in.W, in.row[i % in.W]}; });
  team.sync();  // the number of the round says that all of the row is there
  team.for_each(in.R - 1,
                [&](int i) { store_release(reinterpret_cast<uint32_t*>(in.there(round, i)), round); });
}

// One more than the last rank whose row does not come in time, or 0. Begins and ends with a barrier.
template <class Team>
ISOLOAD_HD int wait_for_rows(Team& team, const RowGather& in, uint32_t round) {
  const int64_t end = nanoseconds() + in.patience;
  int late = 0;
  team.for_each(in.R, [&](int r) {
    const uint32_t* const number = reinterpret_cast<const uint32_t*>(in.place(in.own, round, r));
    while (r != in.rank && load_acquire(number) != round) {
      if (nanoseconds() > end) {
        late = r + 1;
        return;
      }
      pause();
    }
  });
  return static_cast<int>(team.max(late));
}

// rows [R, W] of all ranks. Returns 0, or one more than the rank that was too late; from then on at once, for
// this board gathers no more. Then the late rank's row is full of INT32_MAX, which no planner takes for
// loads, and other ranks' rows are 0: nothing old is left.
template <class Team>
ISOLOAD_HD int gather_rows(Team& team, const RowGather& in, int32_t* rows) {
  const uint32_t round = static_cast<uint32_t>(in.own[Board::kRounds]) + 1;
  int late = in.own[Board::kLate];
  if (late == 0) {
    put_row(team, in, round);
    late = wait_for_rows(team, in, round);
    if (team.rank() == 0) {
      in.own[Board::kRounds] = static_cast<int32_t>(round);
      in.own[Board::kLate] = late;
    }
  }
  write_words(team, in.R * in.W, [&](int i) {
    const int r = i / in.W, w = i % in.W;
    const int32_t instead = r == late - 1 ? INT32_MAX : 0;
    const int32_t* const there = in.place(in.own, round, r) + 1;
    return Word{rows + i, r == in.rank ? in.row[w] : late == 0 ? there[w] : instead};
  });
  return late;
}

}  // namespace isoload
