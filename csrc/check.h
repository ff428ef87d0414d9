// Argument checks: a message names the argument, the rule and the value. Python turns it into ValueError.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

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

inline void require_shape(const Tensor& tensor, const char* name, std::initializer_list<int64_t> shape) {
  bool same = tensor.dim() == static_cast<int64_t>(shape.size());
  int64_t i = 0;
  for (const int64_t n : shape) same = same && tensor.size(i++) == n;
  if (same) return;
  std::ostringstream expected;  // made where it is told: that takes longer than all other checks
  for (auto n = shape.begin(); n != shape.end(); ++n) expected << (n == shape.begin() ? "" : ", ") << *n;
  require(false, name, " must have shape [", expected.str(), "], got ", shape_text(tensor));
}

}  // namespace isoload
