// The offline placers' loops over plain arrays, for python/isoload/placers/compiled.py: no Python and no
// torch, so that one build serves every version of both. Shapes, and values that memory depends on, are
// checked there.
#include <atomic>
#include <cstdio>
#include <mutex>
#include <thread>

#include "placers/eplb.h"
#include "placers/near.h"
#include "placers/scenario.h"

using namespace isoload::placers;

namespace {

// Calls solve(layer) for 0..layers-1 over threads. Each layer is solved alone, so the number of threads
// changes no bit. Null, or what the first layer to fail could not do; kept until this thread's next call.
template <class Solve>
const char* plan_layers(int layers, int threads, const Solve& solve) {
  thread_local char fault[200];  // no destructor: it may outlive this library's own
  char* const said = fault;      // not that of another thread
  *said = 0;
  std::atomic<int> next{0};
  std::mutex failing;
  auto work = [&] {
    for (int layer; (layer = next++) < layers;) {
      try {
        solve(layer);
      } catch (const std::exception& error) {
        const std::lock_guard<std::mutex> lock(failing);
        if (*said == 0) std::snprintf(said, sizeof fault, "%s", error.what());
      }
    }
  };
  std::vector<std::thread> others;
  try {
    for (int i = 1; i < threads && i < layers; ++i) others.emplace_back(work);
  } catch (const std::exception&) {  // no more threads to be had: those that there are take all layers
  }
  work();
  for (auto& thread : others) thread.join();
  return *said ? said : nullptr;
}

}  // namespace

#define ISOLOAD_EXPORT extern "C" [[gnu::visibility("default")]]

// weight [L, E], capacity [L, R] -> slots [L, R, width], which hold -1 before.
ISOLOAD_EXPORT const char* isoload_place_eplb(const float* weight, const int32_t* capacity, int layers,
                                              int experts, int ranks, int width, int dedup, int threads,
                                              int32_t* slots) {
  return plan_layers(layers, threads, [=](int64_t l) {
    EplbLayer(weight + l * experts, experts, capacity + l * ranks, ranks, width, dedup)
        .place(slots + l * ranks * width);
  });
}

// loads [L, E, n] whole numbers, weight [n], tick [R], node [R], home [L, E] (-1 = none), capacity [L, R],
// risks [z, L, E], rival and before [L, R, width] or null -> slots [L, R, width], objective [L].
ISOLOAD_EXPORT const char* isoload_place_scenario(
    const double* loads, const double* weight, const double* tick, const int32_t* node, const int32_t* home,
    const int32_t* capacity, const double* risks, const int32_t* rival, const int32_t* before, int layers,
    int experts, int n, int ranks, int num_risks, int width, int exact, int few_slots, int steps, int moves,
    int threads, int32_t* slots, double* objective) {
  return plan_layers(layers, threads, [=](int64_t l) {
    const int64_t size = static_cast<int64_t>(ranks) * width;
    Problem problem{};
    problem.experts = experts, problem.ranks = ranks, problem.width = width, problem.scenarios = n;
    problem.load = loads + l * experts * n, problem.weight = weight, problem.tick = tick;
    problem.capacity = capacity + l * ranks, problem.node = node, problem.home = home + l * experts;
    problem.exact = exact != 0;
    const Starts starts{risks + l * experts, num_risks, static_cast<size_t>(layers) * experts,
                        rival ? rival + l * size : nullptr};
    const Limits limits{steps, moves, few_slots != 0, before ? before + l * size : nullptr};
    objective[l] = plan_layer(problem, starts, limits, slots + l * size);
  });
}

// loads and stress [L, E, n] whole numbers, weight [n], tick and node [R], home [L, E], before [L, R, width]
// or null, ids [L, tokens, top_k], token_weight [tokens], rows_node [R] in 0 .. nodes - 1; slots [L, R,
// width] are changed
// -> rows [L, 2] before and after.
ISOLOAD_EXPORT const char* isoload_place_near(
    const double* loads, const double* stress, const double* weight, const double* tick, const int32_t* node,
    const int32_t* home, const int32_t* before, const int32_t* ids, const int32_t* token_weight,
    const int32_t* rows_node, int layers, int experts, int n, int ranks, int width, int tokens, int top_k,
    int nodes, int steps, int walk, int moves, int starts, int threads, int32_t* slots, int64_t* rows) {
  return plan_layers(layers, threads, [=](int64_t l) {
    const int64_t size = static_cast<int64_t>(ranks) * width, loaded = static_cast<int64_t>(experts) * n;
    Problem problem{};
    problem.experts = experts, problem.ranks = ranks, problem.width = width, problem.scenarios = n;
    problem.load = loads + l * loaded, problem.weight = weight, problem.tick = tick;
    problem.node = node, problem.home = home + l * experts;
    const Choices choices{ids + l * tokens * top_k, token_weight, rows_node, tokens, top_k, nodes};
    const NearLimits limits{steps, walk, moves, before ? before + l * size : nullptr};
    place_near(problem, stress + l * loaded, choices, limits, starts, slots + l * size, rows + 2 * l);
  });
}
