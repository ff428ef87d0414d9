// Argument checks: a message names the argument, the rule and the value. Python turns it into ValueError.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>

namespace isoload {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class... Parts>
void require(bool holds, const Parts&... parts) {
  if (holds) return;
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error("isoload: " + text.str());  // ops/library.py strips the mark and raises ValueError
}

inline const char* dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Byte:
      return "uint8";
    default:
      return "another dtype";
  }
}

inline std::string shape_text(const Tensor& tensor) {
  std::ostringstream text;
  text << '[';
  for (int64_t i = 0; i < tensor.dim(); ++i) text << (i ? ", " : "") << tensor.size(i);
  text << ']';
  return text.str();
}

inline void require_dtype(const Tensor& tensor, const char* name, ScalarType type) {
  require(tensor.scalar_type() == type, name, " must be ", dtype_name(type), ", got ",
          dtype_name(tensor.scalar_type()));
}

inline void require_ids(const Tensor& tensor, const char* name) {
  const ScalarType type = tensor.scalar_type();
  require(type == ScalarType::Int || type == ScalarType::Long, name, " must be int32 or int64, got ",
          dtype_name(type));
}

// Ids or slots of T tokens, K each.
inline void require_columns(const Tensor& tensor, const char* name) {
  require_ids(tensor, name);
  require(tensor.dim() == 2, name, " must be [T, K], got ", shape_text(tensor));
}

// The sizes of a tensor, four at most.
struct Sizes {
  Sizes(std::initializer_list<int64_t> sizes) {
    for (const int64_t n : sizes) of[count++] = n;
  }
  int64_t of[4];
  int64_t count = 0;
};

inline void require_shape(const Tensor& tensor, const char* name, const Sizes& shape) {
  bool same = tensor.dim() == shape.count;
  for (int64_t i = 0; i < shape.count; ++i) same = same && tensor.size(i) == shape.of[i];
  if (same) return;
  std::ostringstream expected;  // made where it is told: that takes longer than all other checks
  for (int64_t i = 0; i < shape.count; ++i) expected << (i ? ", " : "") << shape.of[i];
  require(false, name, " must have shape [", expected.str(), "], got ", shape_text(tensor));
}

inline void require_in(const char* name, int64_t value, int64_t low, int64_t high) {
  require(value >= low && value <= high, name, " must be in ", low, "..", high, ", got ", value);
}

inline void require_per_node(int64_t ranks_per_node, int64_t R) {
  require(ranks_per_node >= 1 && R % ranks_per_node == 0, "ranks_per_node must divide ", R, ", got ",
          ranks_per_node);
}

inline int require_int(const char* name, int64_t value) {
  require(value >= 0 && value <= INT32_MAX, name, " must be in 0..2^31-1, got ", value);
  return static_cast<int>(value);
}

}  // namespace isoload
