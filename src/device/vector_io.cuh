// Global memory in pieces of up to 16 bytes, the widest access of a thread.
#pragma once

#include "base/host_device.h"

namespace narrowfloat {

// Memory that this kernel does not write. An ordinary load all the same: ld.global.nc (__ldg) says
// that nobody writes the memory while the kernel runs, and ptxas then moves it above
// griddepcontrol.wait, where the grid before this one may still be writing.
template <typename Vector>
__device__ inline Vector load_readonly(const void* address) {
  static_assert(sizeof(Vector) <= 16);
  // Where the compiler cannot see it, a generic load would be slower.
  __builtin_assume(__isGlobal(address));
  return *static_cast<const Vector*>(address);
}

template <typename Vector>
__device__ inline void store(void* address, const Vector& value) {
  static_assert(sizeof(Vector) <= 16);
  *static_cast<Vector*>(address) = value;
}

}  // namespace narrowfloat
