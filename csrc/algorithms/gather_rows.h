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

constexpr int kMostBeside = 32;

struct RowGather {
  const int32_t* row;           // [W]
  const int64_t* boards;        // [R] address of every rank's board, as this rank reaches it
  int32_t* own;                 // this rank's board
  int32_t beside[kMostBeside];  // [F] that travel behind the row, from the host
  int R, W, F, rank;
  int64_t patience;  // nanoseconds until a rank is late

  ISOLOAD_HD int width() const { return W + F; }
  ISOLOAD_HD int32_t word(int w) const { return w < W ? row[w] : beside[w - W]; }

  // The place of rank r's row on a board.
  ISOLOAD_HD int32_t* place(int32_t* board, uint32_t round, int r) const {
    return board + kLineWords + (int64_t(round & 1) * R + r) * Board::place_words(width());
  }
  // The place of this rank's row on the i-th rank's board. All ranks begin with another one and end with
  // their own, which is reached by one address alone.
  ISOLOAD_HD int32_t* there(uint32_t round, int i) const {
    const int r = rank + 1 + i < R ? rank + 1 + i : rank + 1 + i - R;
    return place(r == rank ? own : reinterpret_cast<int32_t*>(boards[r]), round, rank);
  }
};

// What all ranks have in the end.
struct GatheredRows {
  int32_t *rows, *beside;  // [R, W], [R, F]
  int W, F;

  ISOLOAD_HD int32_t& word(int r, int w) const { return w < W ? rows[r * W + w] : beside[r * F + w - W]; }
};

constexpr int kWordsAhead = 8;  // read before the first is written, behind which no read is moved up

template <class Team>
ISOLOAD_HD void put_row(Team& team, const RowGather& in, uint32_t round) {
  team.for_each(in.width(), [&](int w) {
    const int32_t word = in.word(w);
    ISOLOAD_ROLLED
    for (int first = 0; first < in.R; first += kWordsAhead) {
      int32_t* there[kWordsAhead];
      for (int a = 0; a < kWordsAhead; ++a)
        there[a] = in.there(round, first + a < in.R ? first + a : in.R - 1);
      for (int a = 0; a < kWordsAhead; ++a) there[a][1 + w] = word;
    }
  });
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

// Returns 0, or one more than the rank that was too late; from then on at once, for this board gathers no
// more. Then the late rank's row is full of INT32_MAX, which no planner takes for loads, and all other rows
// are 0: nothing old is left.
template <class Team>
ISOLOAD_HD int gather_rows(Team& team, const RowGather& in, const GatheredRows& out) {
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
  team.for_each(in.width(), [&](int w) {
    ISOLOAD_ROLLED
    for (int first = 0; first < in.R; first += kWordsAhead) {
      int32_t words[kWordsAhead];
      for (int a = 0; a < kWordsAhead; ++a) {
        const int r = first + a < in.R ? first + a : in.R - 1;
        words[a] = late == 0 ? in.place(in.own, round, r)[1 + w] : r == late - 1 ? INT32_MAX : 0;
      }
      for (int a = 0; a < kWordsAhead; ++a)
        if (first + a < in.R) out.word(first + a, w) = words[a];
    }
  });
  return late;
}

}  // namespace isoload
