// A kernel starts before the one ahead of it in its stream has ended (programmatic dependent launch, compute
// capability 9.0 on) and waits for that inside: what a launch takes passes beside the kernel ahead.
//
// Every kernel here is launched so, and keeps three rules (tests/tools/sass.py and tests/native/simt see to
// it):
// - It waits before it touches global memory, writes included: the kernel ahead may still read there.
// - Every block waits, one without work too. The wait is for the kernel ahead alone; could that one end
//   without waiting, the kernel ahead of it might still run.
// - It lets the next kernel start behind its own wait, not sooner: what the next one reads before its wait
//   (in other libraries: weights) is then as old as if all ran one after another. So a kernel that writes
//   weights (borrow) never lets it.
//
// Kernels that are launched as usual, torch's for one, wait for all before them and let the next start at
// their end. Stream capture makes of such a launch a programmatic edge of the graph from CUDA 12.3 on: CUDA
// Programming Guide, "Programmatic Dependent Launch and Synchronization", Use in CUDA Graphs.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdlib>
#include <string_view>

namespace isoload::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ inline void wait_for_kernel_ahead() { cudaGridDependencySynchronize(); }
__device__ inline void let_next_kernel_start() { cudaTriggerProgrammaticLaunchCompletion(); }
#else
__device__ inline void wait_for_kernel_ahead() {}
__device__ inline void let_next_kernel_start() {}
#endif

// The first step of a kernel.
__device__ inline void take_turn() {
  wait_for_kernel_ahead();
  let_next_kernel_start();
}

// What CUDA refused as text, or null. The thread forgets it: else the next launch would find it again.
inline const char* refused(cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  (void)cudaGetLastError();
  return cudaGetErrorString(error);
}

// Whether this device's kernels have the wait, and its driver such edges. Only the code itself tells.
inline bool has_early_start(const void* any_kernel) {
  constexpr int kDevices = 64, kCuda = 12030, kCompute = 90;
  enum { kUnknown, kNo, kYes };
  static std::atomic<int> known[kDevices];
  int device = 0;
  cudaGetDevice(&device);
  if (device >= kDevices) return false;
  if (const int found = known[device].load(std::memory_order_relaxed)) return found == kYes;
  int driver = 0;
  cudaFuncAttributes code{};
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // as for the error word
  cudaThreadExchangeStreamCaptureMode(&mode);
  cudaError_t error = cudaDriverGetVersion(&driver);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&code, any_kernel);
  cudaThreadExchangeStreamCaptureMode(&mode);
  if (refused(error) != nullptr) return false;  // the launch says it
  const bool has = driver >= kCuda && code.ptxVersion >= kCompute;
  known[device].store(has ? kYes : kNo, std::memory_order_relaxed);
  return has;
}

// ISOLOAD_PDL=0: kernels start one after another. For whoever looks for a fault.
inline bool starts_early(const void* kernel) {
  const char* const wanted = std::getenv("ISOLOAD_PDL");
  return (wanted == nullptr || std::string_view(wanted) != "0") && has_early_start(kernel);
}

}  // namespace isoload::cuda
