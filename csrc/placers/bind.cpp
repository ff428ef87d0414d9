// isoload._place: the offline placers' loops on NumPy arrays. Shapes and values are checked in Python; what
// is checked here keeps memory safe.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <vector>

#include "placers/eplb.h"
#include "placers/layers.h"
#include "placers/scenario.h"

namespace py = pybind11;
using namespace isoload::placers;

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;

void need(bool holds, const char* rule) {
  if (!holds) throw py::value_error(rule);
}

// weight [L, E] float32, capacity [L, R] int32 -> slots [L, R, S] int32, S the largest capacity.
Array<int32_t> eplb(const Array<float>& weight, const Array<int32_t>& capacity, bool dedup, int threads) {
  need(weight.ndim() == 2 && capacity.ndim() == 2 && weight.shape(0) == capacity.shape(0),
       "weight must be [L, E] and capacity [L, R]");
  const int layers = static_cast<int>(weight.shape(0)), experts = static_cast<int>(weight.shape(1));
  const int ranks = static_cast<int>(capacity.shape(1));
  const int32_t* all = capacity.data();
  const int width = capacity.size() ? *std::max_element(all, all + capacity.size()) : 0;
  for (int l = 0; l < layers; ++l) {
    const int32_t* row = all + static_cast<size_t>(l) * ranks;
    need(std::all_of(row, row + ranks, [](int c) { return c >= 0; }), "capacity must not be negative");
    need(std::accumulate(row, row + ranks, int64_t{0}) >= experts, "capacity must hold every expert");
    need(!dedup || std::all_of(row, row + ranks, [=](int c) { return c <= experts; }),
         "capacity must be at most the number of experts on a rank");
  }
  Array<int32_t> slots({layers, ranks, width});
  int32_t* out = slots.mutable_data();
  std::fill(out, out + slots.size(), -1);
  {
    py::gil_scoped_release released;
    for_layers(layers, threads, [&](int l) {
      EplbLayer(weight.data() + static_cast<size_t>(l) * experts, experts,
                all + static_cast<size_t>(l) * ranks, ranks, width, dedup)
          .place(out + static_cast<size_t>(l) * ranks * width);
    });
  }
  return slots;
}

// A pointer to layer l's part of an array [..., L, ...], or null if none was given.
const int32_t* layer_of(const std::optional<Array<int32_t>>& array, int l, size_t size) {
  return array ? array->data() + l * size : nullptr;
}

// Slots that are taken over must be in range, within capacity and without repeats: the search relies on it.
void need_valid(const std::optional<Array<int32_t>>& slots, const Array<int32_t>& capacity, int experts,
                const char* rule) {
  if (!slots) return;
  const auto ranks = capacity.shape(1), width = slots->ndim() == 3 ? slots->shape(2) : 0;
  bool valid = slots->ndim() == 3 && slots->shape(0) == capacity.shape(0) && slots->shape(1) == ranks;
  for (py::ssize_t row = 0; valid && row < capacity.size(); ++row) {
    std::vector<bool> seen(experts);
    for (py::ssize_t i = 0; valid && i < width; ++i) {
      const int e = slots->data()[row * width + i];
      valid = e >= -1 && e < experts && (e < 0 || (i < capacity.data()[row] && !seen[e]));
      if (valid && e >= 0) seen[e] = true;
    }
  }
  need(valid, rule);
}

// loads [L, E, n] whole numbers, weight [n], tick [R], node [R], home [L, E] (-1 = none), capacity [L, R],
// risks [z, L, E], rival and before [L, R, width] -> slots [L, R, width], objective [L].
py::tuple scenario(const Array<double>& loads, const Array<double>& weight, const Array<double>& tick,
                   const Array<int32_t>& node, const Array<int32_t>& home, const Array<int32_t>& capacity,
                   const Array<double>& risks, const std::optional<Array<int32_t>>& rival,
                   const std::optional<Array<int32_t>>& before, int width, bool exact, bool few_slots,
                   int steps, int moves, int threads) {
  need(loads.ndim() == 3 && capacity.ndim() == 2 && home.ndim() == 2 && risks.ndim() == 3,
       "loads must be [L, E, n], capacity [L, R], home [L, E] and risks [z, L, E]");
  const int layers = static_cast<int>(loads.shape(0)), experts = static_cast<int>(loads.shape(1));
  const int n = static_cast<int>(loads.shape(2)), ranks = static_cast<int>(capacity.shape(1));
  need(n % kLanes == 0 && weight.size() == n, "weight must be [n] for loads [L, E, n], n a multiple of 4");
  need(tick.size() == ranks && node.size() == ranks, "tick and node must be [R]");
  need(capacity.shape(0) == layers && home.shape(0) == layers && home.shape(1) == experts,
       "capacity must be [L, R] and home [L, E]");
  need(risks.shape(1) == layers && risks.shape(2) == experts, "risks must be [z, L, E]");
  need(before || rival || risks.shape(0) > 0, "risks must be given without before");
  need(std::all_of(capacity.data(), capacity.data() + capacity.size(),
                   [=](int c) { return c >= 0 && c <= width && c <= experts; }),
       "capacity must be in 0..width and at most the number of experts");
  for (int l = 0; l < layers; ++l) {
    const int32_t* row = capacity.data() + static_cast<size_t>(l) * ranks;
    need(std::accumulate(row, row + ranks, int64_t{0}) >= experts, "capacity must hold every expert");
  }
  need_valid(rival, capacity, experts,
             "rival must be [L, R, width], within capacity, no expert twice on a rank");
  need_valid(before, capacity, experts,
             "before must be [L, R, width], within capacity, no expert twice on a rank");
  Array<int32_t> slots({layers, ranks, width});
  Array<double> objective(layers);
  int32_t* out = slots.mutable_data();
  double* found = objective.mutable_data();
  {
    py::gil_scoped_release released;
    for_layers(layers, threads, [&](int l) {
      const size_t each = static_cast<size_t>(experts), size = static_cast<size_t>(ranks) * width;
      const Problem problem{experts,
                            ranks,
                            width,
                            n,
                            loads.data() + l * each * n,
                            weight.data(),
                            tick.data(),
                            capacity.data() + static_cast<size_t>(l) * ranks,
                            node.data(),
                            home.data() + l * each,
                            exact};
      const Starts starts{risks.data() + l * each, static_cast<int>(risks.shape(0)), layers * each,
                          layer_of(rival, l, size)};
      found[l] = plan_layer(problem, starts, Limits{steps, moves, few_slots, layer_of(before, l, size)},
                            out + l * size);
    });
  }
  return py::make_tuple(slots, objective);
}

}  // namespace

PYBIND11_MODULE(_place, module) {
  module.doc() = "Loops of isoload's offline placers.";
  module.def("eplb", &eplb, py::arg("weight"), py::arg("capacity"), py::arg("dedup"), py::arg("threads"));
  module.def("scenario", &scenario, py::arg("loads"), py::arg("weight"), py::arg("tick"), py::arg("node"),
             py::arg("home"), py::arg("capacity"), py::arg("risks"), py::arg("rival"), py::arg("before"),
             py::arg("width"), py::arg("exact"), py::arg("few_slots"), py::arg("steps"), py::arg("moves"),
             py::arg("threads"));
}
