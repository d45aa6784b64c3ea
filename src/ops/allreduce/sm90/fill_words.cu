// Fills memory with a 32-bit word.
#include <algorithm>

#include "device/ptx/grid_dependency.cuh"
#include "ops/allreduce/allreduce_sm90.h"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/launch.h"

namespace narrowfloat {
namespace {

constexpr unsigned kFillThreads = 256;

__global__ void fill_words_kernel(uint32_t* memory, int64_t words, uint32_t value) {
  wait_for_previous_grids();
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < words; i += step) {
    memory[i] = value;
  }
}

}  // namespace

void fill_words(void* memory, int64_t words, uint32_t value, Device device, Stream stream) {
  const CudaDeviceScope scope(device);
  constexpr int64_t kMostCtas = 1024;
  const int64_t ctas = std::min(ceil_div(words, int64_t{kFillThreads}), kMostCtas);
  launch(fill_words_kernel, {dim3(static_cast<unsigned>(ctas)), dim3(kFillThreads)}, stream,
         static_cast<uint32_t*>(memory), words, value);
}

}  // namespace narrowfloat
