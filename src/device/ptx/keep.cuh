// Telling the compiler what to hold in registers.
#pragma once

#include "base/host_device.h"

namespace narrowfloat {

// The same value, which the compiler then keeps or spills instead of making it anew where it is
// used again.
__device__ inline uint32_t keep_in_register(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

}  // namespace narrowfloat
