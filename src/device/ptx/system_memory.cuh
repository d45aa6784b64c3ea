// Accesses to memory that other GPUs, other processes or the host see, with their order (PTX ISA,
// Memory Consistency Model). The scope is the system unless a name says otherwise.
#pragma once

#include "base/host_device.h"

namespace narrowfloat {

// st.relaxed.sys.v4: each 32-bit word is written at once; the words may become visible in any
// order.
__device__ inline void store_relaxed_16(void* address, const uint4& value) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

// st.relaxed.sys.b64: both words are written at once.
__device__ inline void store_relaxed_8(void* address, const uint2& value) {
  const uint64_t words = uint64_t{value.y} << 32 | value.x;
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(words) : "memory");
}

// ld.relaxed.sys.v4: reads memory, never a stale line of the L1 cache.
__device__ inline uint4 load_relaxed_16(const void* address) {
  uint4 value;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address)
               : "memory");
  return value;
}

__device__ inline uint32_t load_relaxed(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline uint32_t load_acquire(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// st.release.sys: what this thread wrote, or saw written through barriers, is visible to those who
// acquire the value.
__device__ inline void store_release(uint32_t* address, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// fence.acq_rel.sys
__device__ inline void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// atom.acq_rel.gpu.cas: stores `value` where `expected` was; returns the previous value.
__device__ inline uint32_t swap_if_equal_gpu(uint32_t* address, uint32_t expected, uint32_t value) {
  uint32_t previous;
  asm volatile("atom.acq_rel.gpu.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(previous)
               : "l"(address), "r"(expected), "r"(value)
               : "memory");
  return previous;
}

// %globaltimer: nanoseconds since some moment in the past, the same for all SMs.
__device__ inline uint64_t global_time_ns() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

}  // namespace narrowfloat
