// gather_rows between R ranks of N lanes each, a thread per lane, over boards in one memory. Every rank looks
// at every row of every round; some wait at random before a round. Under ThreadSanitizer a missing barrier,
// release or acquire is reported as a data race, and so is a row that is overwritten while another rank reads
// it.
//   gathering RANKS LANES ROUNDS
// Prints one line; the exit code is 1 if a row was wrong or a rank late.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "algorithms/gather_rows.h"

namespace isoload {

constexpr int kWidth = 37, kBeside = 3;  // of them from the host

int32_t value(int rank, int round, int w) { return rank * 1000003 + round * 1009 + w; }

struct Rank {
  explicit Rank(int ranks, int lanes)
      : group(lanes), board(Board::words(ranks, kWidth)), row(kWidth), rows(std::size_t(ranks) * kWidth) {}
  ThreadTeam::Group group;
  std::vector<int32_t> board, row, rows;
};

int run(int R, int lanes, int rounds) {
  std::vector<Rank*> ranks;
  std::vector<int64_t> boards;
  for (int r = 0; r < R; ++r) {
    ranks.push_back(new Rank(R, lanes));
    boards.push_back(reinterpret_cast<int64_t>(ranks[r]->board.data()));
  }
  std::atomic<int> wrong{0}, late{0};
  auto lane = [&](int r, int l) {
    Rank& me = *ranks[r];
    ThreadTeam team(me.group, l);
    std::mt19937 random(r);
    RowGather in{me.row.data(), boards.data(), me.board.data(), {}, R, kWidth - kBeside, kBeside, r,
                 20'000'000'000};
    int32_t* const beside = me.rows.data() + R * in.W;
    for (int round = 0; round < rounds; ++round) {
      const bool waits = random() % 8 == 0;
      if (l == 0 && waits) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
      team.for_each(kWidth, [&](int w) { me.row[w] = value(r, round, w); });
      team.sync();
      for (int f = 0; f < kBeside; ++f) in.beside[f] = value(r, round, in.W + f);
      if (gather_rows(team, in, {me.rows.data(), beside, in.W, in.F}) != 0) ++late;
      team.sync();
      team.for_each(R * in.W, [&](int i) { wrong += me.rows[i] != value(i / in.W, round, i % in.W); });
      team.for_each(R * kBeside,
                    [&](int i) { wrong += beside[i] != value(i / kBeside, round, in.W + i % kBeside); });
      team.sync();
    }
  };
  std::vector<std::thread> threads;
  for (int r = 0; r < R; ++r)
    for (int l = 0; l < lanes; ++l) threads.emplace_back(lane, r, l);
  for (std::thread& thread : threads) thread.join();
  for (Rank* rank : ranks) delete rank;
  std::printf("%d rounds %d wrong %d late\n", rounds, wrong.load(), late.load());
  return wrong != 0 || late != 0;
}

}  // namespace isoload

int main(int, char** arguments) {
  return isoload::run(std::atoi(arguments[1]), std::atoi(arguments[2]), std::atoi(arguments[3]));
}
