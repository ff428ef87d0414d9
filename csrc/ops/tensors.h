// What the ops share: new tensors, plain pointers into tensors, and the tables of a batch of layers.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>

#include "algorithms/replica_tables.h"
#include "check.h"

namespace isoload::ops {

// A new tensor on the device of `like`. Straight through the C shim: going by the dispatcher's string look-up
// costs a microsecond per tensor, a third of a whole plan.
inline Tensor new_empty(const Tensor& like, std::initializer_list<int64_t> sizes,
                        ScalarType dtype = ScalarType::Int) {
  int32_t device_type, device_index;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  int64_t strides[4], stride = 1;
  for (std::size_t i = sizes.size(); i-- > 0; stride *= sizes.begin()[i]) strides[i] = stride;
  const int32_t code = dtype == ScalarType::Int     ? aoti_torch_dtype_int32()
                       : dtype == ScalarType::Long  ? aoti_torch_dtype_int64()
                       : dtype == ScalarType::Float ? aoti_torch_dtype_float32()
                                                    : aoti_torch_dtype_float64();
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides,
                                                  code, device_type, device_index, &handle));
  return Tensor(handle);
}

inline Tensor dense(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

template <class T>
const T* data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}
template <class T>
T* mutable_data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// The tables of a batch of layers: [..., size], with P slots each.
struct Tables {
  Tables(const Tensor& tensor, int64_t num_slots, int64_t num_experts)
      : owner(dense(tensor)), P(num_slots), E(num_experts) {
    require_dtype(tensor, "tables", ScalarType::Int);
    const int64_t size = ReplicaTables::size(E, P);
    require(tensor.dim() == 1 || tensor.dim() == 2, "tables must have 1 or 2 dimensions, got ", tensor.dim());
    require(tensor.size(tensor.dim() - 1) == size, "tables must be those of ", E, " experts in ", P,
            " slots (", size, " ints), got ", tensor.size(tensor.dim() - 1));
    batch = tensor.dim() == 2 ? tensor.size(0) : 1;
  }
  ReplicaTables layer(int64_t b) const {
    return ReplicaTables::at(data<int32_t>(owner) + b * ReplicaTables::size(E, P), E, P);
  }
  Tensor owner;
  int64_t P, E, batch;
};

}  // namespace isoload::ops
