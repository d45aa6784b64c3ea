// Compiler hints: which values stay in registers, and where they are computed.
#pragma once

#include "base/host_device.h"

namespace narrowfloat {

// Makes the compiler keep or spill `value` instead of rematerializing it at its next use.
__device__ inline uint32_t keep_in_register(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// keep_in_register() for an address in global memory. The compiler would lose the address space of
// a generic pointer.
__device__ inline uint8_t* keep_global_in_register(uint8_t* address) {
  asm volatile("" : "+l"(address));
  __builtin_assume(__isGlobal(address));
  return address;
}

// Computes `value` before this point; memory accesses do not move across it.
__device__ inline void keep_before(uint32_t& value) { asm volatile("" : "+r"(value)::"memory"); }

// Forces the compiler to rematerialize what depends on `value` after this point.
__device__ inline void keep_apart(float& value) { asm volatile("" : "+f"(value)); }

}  // namespace narrowfloat
