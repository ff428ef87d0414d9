// Layers over threads. Each layer is solved alone, so the number of threads changes no bit.
#pragma once

#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace isoload::placers {

// Calls solve(layer) for 0..num_layers-1; the first exception of any layer is thrown again when all have
// ended.
template <class Solve>
void for_layers(int num_layers, int threads, const Solve& solve) {
  std::atomic<int> next{0};
  std::exception_ptr failure;
  std::mutex failing;
  auto work = [&] {
    for (int layer; (layer = next++) < num_layers;) {
      try {
        solve(layer);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(failing);
        if (!failure) failure = std::current_exception();
      }
    }
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads && i < num_layers; ++i) others.emplace_back(work);
  work();
  for (auto& thread : others) thread.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace isoload::placers
