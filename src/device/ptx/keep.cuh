// Telling the compiler what to hold in registers, and where.
#pragma once

#include "base/host_device.h"

namespace narrowfloat {

// The same value, which the compiler then keeps or spills instead of making it anew where it is
// used again.
__device__ inline uint32_t keep_in_register(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// The same for an address in global memory, and no other: behind the asm the compiler would no
// longer know that it is one.
__device__ inline uint8_t* keep_global_in_register(uint8_t* address) {
  asm volatile("" : "+l"(address));
  __builtin_assume(__isGlobal(address));
  return address;
}

// Whatever makes `value` stays in front of this place, and accesses to memory on their side of it.
__device__ inline void keep_before(uint32_t& value) { asm volatile("" : "+r"(value)::"memory"); }

// What is made of `value` behind this place is made anew, not kept from before it.
__device__ inline void keep_apart(float& value) { asm volatile("" : "+f"(value)); }

}  // namespace narrowfloat
