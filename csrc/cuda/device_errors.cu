// device_errors: the word in which kernels note the rules that their arguments broke.
#include <atomic>

#include "cuda/cuda.h"
#include "cuda/launch.cuh"

namespace isoload::cuda {
namespace {

// Every device has its own, 0 when the library is loaded onto it. Its address never changes, so captured
// graphs may hold it.
__device__ int32_t faults_seen;

__global__ void device_errors_kernel(int32_t* word, int32_t* taken) {
  take_turn();
  *taken = atomicExch(word, 0);
}

}  // namespace

int32_t* error_word() {
  constexpr int kDevices = 64;
  static std::atomic<int32_t*> words[kDevices];  // looked up once: the runtime takes its time
  int device = 0;
  cudaGetDevice(&device);
  int32_t* word = device < kDevices ? words[device].load(std::memory_order_relaxed) : nullptr;
  if (word != nullptr) return word;
  void* address = nullptr;
  // The first look-up loads this module, which a capture of this thread would else refuse. The launch that
  // follows says what went wrong.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  cudaGetSymbolAddress(&address, faults_seen);
  cudaThreadExchangeStreamCaptureMode(&mode);
  word = static_cast<int32_t*>(address);
  if (device < kDevices) words[device].store(word, std::memory_order_relaxed);
  return word;
}

const char* device_errors(int32_t* taken, void* stream) {
  int32_t* const word = error_word();
  if (word == nullptr) return "no error word on this device";
  return launch(device_errors_kernel, 1, 1, 0, stream, word, taken);
}

}  // namespace isoload::cuda
