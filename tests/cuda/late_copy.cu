// See late_copy.h.
#include "cuda/late_copy.h"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/system_memory.cuh"
#include "runtime/cuda/launch.h"

namespace narrowfloat::testing {
namespace {

constexpr int kThreads = 256;

__global__ void copy_late_kernel(uint32_t* to, const uint32_t* from, int64_t num_words) {
  trigger_dependent_launch_before_wait();
  wait_for_previous_grids();
  constexpr uint64_t kDelayNs = 30'000;
  const uint64_t start = global_time_ns();
  while (global_time_ns() - start < kDelayNs) {
  }
  for (int64_t i = threadIdx.x; i < num_words; i += kThreads) to[i] = from[i];
}

}  // namespace

void copy_late(void* to, const void* from, int64_t num_words, Stream stream) {
  launch(copy_late_kernel, {.ctas = dim3(1), .threads = dim3(kThreads)}, stream,
         static_cast<uint32_t*>(to), static_cast<const uint32_t*>(from), num_words);
}

}  // namespace narrowfloat::testing
