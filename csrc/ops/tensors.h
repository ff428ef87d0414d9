// What the ops share: new tensors, and plain pointers into tensors.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "check.h"

namespace isoload::ops {

using Maybe = std::optional<Tensor>;

// A new tensor on the device of `like`. Straight through the C shim: going by the dispatcher's string look-up
// costs a microsecond per tensor, a third of a whole plan.
inline Tensor new_tensor(const Tensor& like, const Sizes& sizes, ScalarType dtype = ScalarType::Int) {
  int32_t device_type, device_index;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  int64_t strides[4], stride = 1;
  for (int64_t i = sizes.count; i-- > 0; stride *= sizes.of[i]) strides[i] = stride;
  const int32_t code = dtype == ScalarType::Int     ? aoti_torch_dtype_int32()
                       : dtype == ScalarType::Long  ? aoti_torch_dtype_int64()
                       : dtype == ScalarType::Byte  ? aoti_torch_dtype_uint8()
                       : dtype == ScalarType::Float ? aoti_torch_dtype_float32()
                                                    : aoti_torch_dtype_float64();
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(sizes.count, sizes.of, strides, code, device_type, device_index, &handle));
  return Tensor(handle);
}

inline Tensor dense(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

template <class T>
const T* data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}
// Null where there is none.
template <class T>
const T* data(const Maybe& tensor) {
  return tensor ? data<T>(*tensor) : nullptr;
}
template <class T>
T* mutable_data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// run(ids) or run(ids, out) with pointers of the ids' own type, int32 or int64.
template <class Run>
auto with_ids(const Tensor& ids, Run&& run) {
  return ids.scalar_type() == ScalarType::Int ? run(data<int32_t>(ids)) : run(data<int64_t>(ids));
}
template <class Run>
auto with_ids(const Tensor& ids, const Tensor& out, Run&& run) {
  if (ids.scalar_type() == ScalarType::Int) return run(data<int32_t>(ids), mutable_data<int32_t>(out));
  return run(data<int64_t>(ids), mutable_data<int64_t>(out));
}

}  // namespace isoload::ops
