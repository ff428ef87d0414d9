// isoload._place: the offline placers' loops on NumPy arrays. Shapes and values are checked in Python; what is checked
// here keeps memory safe.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

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
      EplbLayer(weight.data() + static_cast<size_t>(l) * experts, experts, all + static_cast<size_t>(l) * ranks, ranks,
                width, dedup)
          .place(out + static_cast<size_t>(l) * ranks * width);
    });
  }
  return slots;
}

// loads [L, E, n], weight [n], tick [R], capacity [L, R], node [R], home [L, E], risks [z, L, E].
py::tuple scenario(const Array<double>& loads, const Array<double>& weight, const Array<double>& tick,
                   const Array<int32_t>& capacity, const Array<int32_t>& node, const Array<int32_t>& home,
                   const Array<double>& risks, bool exact, int steps, int threads) {
  const int layers = static_cast<int>(loads.shape(0)), experts = static_cast<int>(loads.shape(1));
  const int n = static_cast<int>(loads.shape(2)), ranks = static_cast<int>(capacity.shape(1));
  const int variants = static_cast<int>(risks.shape(0));
  const int32_t* all = capacity.data();
  const int width = *std::max_element(all, all + capacity.size());
  Array<int32_t> slots({layers, ranks, width});
  Array<double> values(layers);
  int32_t* out = slots.mutable_data();
  double* found = values.mutable_data();
  {
    py::gil_scoped_release released;
    for_layers(layers, threads, [&](int l) {
      const Problem problem{experts, ranks, width, n, loads.data() + static_cast<size_t>(l) * experts * n,
                            weight.data(), tick.data(), all + static_cast<size_t>(l) * ranks, node.data(),
                            home.data() + static_cast<size_t>(l) * experts, exact};
      Problem even = problem;
      even.exact = false;
      double least = 0;
      for (int z = 0; z < variants; ++z) {
        const double* risk = risks.data() + (static_cast<size_t>(z) * layers + l) * experts;
        Layout layout(even);
        lay_out(layout, choose_copies(even, risk), risk);
        double value = steps ? Search(layout, steps).run() : layout.objective();
        if (exact) {
          layout.problem = &problem;
          value = Search(layout, steps).run();
        }
        if (z && value >= least) continue;
        least = value;
        std::copy(layout.slot.begin(), layout.slot.end(), out + static_cast<size_t>(l) * ranks * width);
      }
      found[l] = least;
    });
  }
  return py::make_tuple(slots, values);
}

}  // namespace

PYBIND11_MODULE(_place, module) {
  module.doc() = "Loops of isoload's offline placers.";
  module.def("eplb", &eplb, py::arg("weight"), py::arg("capacity"), py::arg("dedup"), py::arg("threads"));
  module.def("scenario", &scenario);
}
