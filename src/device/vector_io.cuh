// Global memory in pieces of up to 16 bytes, the widest access of a thread.
#pragma once

#include "base/host_device.h"

namespace narrowfloat {

// Memory that nobody writes while the kernel runs: goes through the read-only path.
template <typename Vector>
__device__ inline Vector load_readonly(const void* address) {
  static_assert(sizeof(Vector) <= 16);
  return __ldg(static_cast<const Vector*>(address));
}

template <typename Vector>
__device__ inline void store(void* address, const Vector& value) {
  static_assert(sizeof(Vector) <= 16);
  *static_cast<Vector*>(address) = value;
}

}  // namespace narrowfloat
