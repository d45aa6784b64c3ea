// Kernels need permission for more than 48 KB of dynamic shared memory, once on each device.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace narrowfloat {

// The permission of one kernel: a static object beside its launch. Threads may use it concurrently.
class SharedMemoryOptIn {
 public:
  // `bytes` must be the same in all calls. `device` is current. Throws kDevice where CUDA refuses,
  // and tries again in the next call. After cudaDeviceReset() the kernel cannot be launched any
  // more.
  void allow(const void* kernel, size_t bytes, int device);

 private:
  std::atomic<uint64_t> devices_{0};  // A bit for each device that gave permission.
};

}  // namespace narrowfloat
