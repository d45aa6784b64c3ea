// Shared memory accesses by 32-bit addresses. The compiler need not recompute an address that a
// thread keeps in a register.
#pragma once

#include "base/host_device.h"

namespace narrowfloat {

// The 32-bit address of shared memory that the instructions below take.
__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ld.shared.u32
__device__ inline uint32_t load_shared(uint32_t address) {
  uint32_t result;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(result) : "r"(address) : "memory");
  return result;
}

// ld.shared.v2.u32: 8 bytes.
__device__ inline uint2 load_shared_8(uint32_t address) {
  uint2 result;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(result.x), "=r"(result.y)
               : "r"(address)
               : "memory");
  return result;
}

// ld.shared.v4.u32: 16 bytes.
__device__ inline uint4 load_shared_16(uint32_t address) {
  uint4 result;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(result.x), "=r"(result.y), "=r"(result.z), "=r"(result.w)
               : "r"(address)
               : "memory");
  return result;
}

// st.shared.u32
__device__ inline void store_shared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// st.shared.v2.u32: 8 bytes.
__device__ inline void store_shared_8(uint32_t address, uint32_t low, uint32_t high) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(low), "r"(high) : "memory");
}

// st.shared.v4.u32: 16 bytes.
__device__ inline void store_shared_16(uint32_t address, const uint4& value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

// st.shared.v4.u32: 16 bytes of zeros.
__device__ inline void clear_shared_16(uint32_t address) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

}  // namespace narrowfloat
