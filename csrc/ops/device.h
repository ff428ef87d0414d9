// Where an op runs. The checks of shapes and dtypes serve both devices; values are checked on the CPU only.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "check.h"
#include "cuda/cuda.h"
#include "ops/tensors.h"

#ifdef ISOLOAD_WITH_CUDA
// Weak: a CPU torch, where this library loads too, has no such function.
extern "C" [[gnu::weak]] AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                           void** ret_stream);
#endif

namespace isoload::ops {

inline void require_device(const Tensor& tensor, const char* name, const Tensor& like,
                           const char* like_name) {
  require(tensor.is_cuda() == like.is_cuda() && tensor.get_device_index() == like.get_device_index(), name,
          " must be on the device of ", like_name);
}

// A tensor of this dtype and shape on the device of `like`, without gaps; or none.
inline Tensor checked(const Tensor& tensor, const char* name, ScalarType dtype, const Sizes& shape,
                      const Tensor& like, const char* like_name) {
  require_dtype(tensor, name, dtype);
  require_shape(tensor, name, shape);
  require_device(tensor, name, like, like_name);
  return dense(tensor);
}
inline Maybe checked(const Maybe& tensor, const char* name, ScalarType dtype, const Sizes& shape,
                     const Tensor& like, const char* like_name) {
  if (!tensor) return std::nullopt;
  return checked(*tensor, name, dtype, shape, like, like_name);
}

// Which ranks are alive, one at least.
inline Maybe checked_alive(const Maybe& given, int64_t num_ranks, const Tensor& like, const char* like_name) {
  require(!given || given->scalar_type() == ScalarType::Bool, "alive must be bool, got ",
          dtype_name(given ? given->scalar_type() : ScalarType::Bool));
  const auto alive = checked(given, "alive", ScalarType::Bool, {num_ranks}, like, like_name);
  bool any = !alive || !like.is_cpu();
  for (int64_t r = 0; r < num_ranks && !any; ++r) any = data<bool>(alive)[r];
  require(any, "alive must be true for at least one rank, got none");
  return alive;
}

// What one copy costs on each rank.
inline Maybe checked_ticks(const Maybe& given, int64_t num_ranks, const Tensor& like, const char* like_name) {
  const auto ticks = checked(given, "ticks", ScalarType::Int, {num_ranks}, like, like_name);
  for (int64_t r = 0; ticks && r < num_ranks && like.is_cpu(); ++r) {
    const int32_t tick = data<int32_t>(ticks)[r];
    require(tick >= 1 && tick <= 1 << 20, "ticks must be in 1..2^20, got ", tick, " for rank ", r);
  }
  return ticks;
}

// Sums that batches add to, in place; null where there are none.
inline int64_t* checked_sums(const Maybe& sums, const char* name, int64_t size, const Tensor& like,
                             const char* like_name) {
  if (!sums) return nullptr;
  require_dtype(*sums, name, ScalarType::Long);
  require(sums->is_contiguous() && sums->numel() == size, name, " must be contiguous with ", size,
          " numbers, got ", shape_text(*sums));
  require_device(*sums, name, like, like_name);
  return mutable_data<int64_t>(*sums);
}

// The batch's number [1] on the device of `like`, as a pointer; null where there is none.
inline const int64_t* step_number(const Maybe& step, const Tensor& like, const char* like_name) {
  if (!step) return nullptr;
  require_dtype(*step, "step", ScalarType::Long);
  require(step->numel() == 1, "step must have one element, got ", shape_text(*step));
  require_device(*step, "step", like, like_name);
  return data<int64_t>(*step);
}

// A buffer for one launch. It may be freed behind it: memory goes back to the stream's own pool.
class Scratch {
 public:
  Scratch(const Tensor& like, int64_t bytes) {
    if (bytes > 0) tensor_ = new_tensor(like, {(bytes + 7) / 8}, ScalarType::Long);
  }
  void* data() const { return tensor_ ? tensor_->mutable_data_ptr() : nullptr; }

 private:
  Maybe tensor_;
};

#ifdef ISOLOAD_WITH_CUDA
// The current stream of a device. A weak function that no library brought is null: a call would jump to 0.
inline void* current_stream(int32_t device) {
  if (&aoti_torch_get_current_cuda_stream == nullptr)
    throw std::runtime_error(
        "isoload on CUDA: torch brings no aoti_torch_get_current_cuda_stream: it is built without CUDA, or "
        "isoload is not linked with its libtorch.so (build isoload again)");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return stream;
}
#endif

// If `like` is on a GPU: launch(stream) there, on the current stream, and true. launch returns null, or what
// was refused; a generic lambda, so that a build without CUDA never names what it calls.
template <class Launch>
bool on_cuda(const Tensor& like, Launch&& launch) {
#ifdef ISOLOAD_WITH_CUDA
  if (!like.is_cuda()) return false;
  const int32_t device = like.get_device_index();
  void* stream = current_stream(device);
  const torch::stable::accelerator::DeviceGuard guard(device);
  if (const char* error = launch(stream)) throw std::runtime_error(std::string("isoload on CUDA: ") + error);
  return true;
#else
  return false;
#endif
}

}  // namespace isoload::ops
