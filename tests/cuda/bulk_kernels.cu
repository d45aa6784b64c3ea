// See bulk_kernels.h. Each thread takes every stride-th element of the buffer.
#include "base/host_device.h"
#include "cuda/bulk_kernels.h"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/launch.h"

namespace narrowfloat::testing {
namespace {

constexpr int kThreads = 256;
constexpr int kCtas = 4096;

// A mixture of the bits of a place (murmur3's last step).
__device__ uint32_t hash_of(int64_t place) {
  auto bits = static_cast<uint32_t>(place) ^ static_cast<uint32_t>(place >> 32) * 0x9E3779B9U;
  bits = (bits ^ bits >> 16) * 0x85EBCA6BU;
  bits = (bits ^ bits >> 13) * 0xC2B2AE35U;
  return bits ^ bits >> 16;
}

__global__ void fill_numbers_kernel(uint16_t* elements, int64_t count) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += stride) {
    const uint32_t bits = hash_of(i);
    elements[i] = static_cast<uint16_t>((bits & 0x87FFU) + (120U << 7));
  }
}

__global__ void count_differences_kernel(const uint8_t* a, const uint8_t* b, int64_t count,
                                         unsigned long long* differences) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  unsigned long long found = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += stride) {
    found += a[i] != b[i] ? 1 : 0;
  }
  if (found > 0) atomicAdd(differences, found);
}

constexpr LaunchShape kShape{.ctas = kCtas, .threads = kThreads};

}  // namespace

void fill_with_numbers(const DeviceBuffer& buffer) {
  const CudaDeviceScope scope(gpu());
  launch(fill_numbers_kernel, kShape, {}, reinterpret_cast<uint16_t*>(buffer.data()),
         buffer.size() / 2);
  synchronize_device();
}

int64_t count_differences(const DeviceBuffer& a, const DeviceBuffer& b) {
  const CudaDeviceScope scope(gpu());
  const DeviceBuffer differences(8, {.poison = 0});
  launch(count_differences_kernel, kShape, {}, a.data(), b.data(), a.size(),
         reinterpret_cast<unsigned long long*>(differences.data()));
  int64_t count = 0;
  differences.read(&count, 8);
  return count;
}

}  // namespace narrowfloat::testing
