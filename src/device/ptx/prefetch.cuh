// Prefetches.
#pragma once

#include "base/host_device.h"

namespace narrowfloat {

// prefetch.global.L2: starts to fetch a line into L2. It reads no value and may come before
// wait_for_previous_grids() even for memory that an earlier grid writes: L2 is coherent for all
// SMs. The address must be readable.
__device__ inline void prefetch_to_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace narrowfloat
