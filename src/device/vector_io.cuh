// Global memory accesses of up to 16 bytes, the widest of a thread.
#pragma once

#include "base/host_device.h"

namespace narrowfloat {

// Loads memory that this kernel does not write. It must be a normal load: ld.global.nc (__ldg)
// promises that nobody writes the memory while the kernel runs, and ptxas then moves it above
// griddepcontrol.wait, where the preceding grid may still write.
template <typename Vector>
__device__ inline Vector load_readonly(const void* address) {
  static_assert(sizeof(Vector) <= 16);
  // A generic load, which the compiler emits where it cannot see the address space, is slower.
  __builtin_assume(__isGlobal(address));
  return *static_cast<const Vector*>(address);
}

template <typename Vector>
__device__ inline void store(void* address, const Vector& value) {
  static_assert(sizeof(Vector) <= 16);
  *static_cast<Vector*>(address) = value;
}

}  // namespace narrowfloat
