// Kernels with more than 48 KB of dynamic shared memory have to be allowed it, once on each device.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace narrowfloat {

// Of one kernel: a static object beside its launch. Threads may use it at the same time.
class SharedMemoryOptIn {
 public:
  // `bytes` must be the same in all calls. `device` is current. Throws kDevice, and asks again the
  // next time, where CUDA refuses. After cudaDeviceReset() the kernel cannot be launched any more.
  void allow(const void* kernel, size_t bytes, int device);

 private:
  std::atomic<uint64_t> devices_{0};  // A bit for each that has allowed it.
};

}  // namespace narrowfloat
