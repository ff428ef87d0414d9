// What the ops share: new tensors, and plain pointers into tensors.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>

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
                       : dtype == ScalarType::Byte  ? aoti_torch_dtype_uint8()
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

}  // namespace isoload::ops
