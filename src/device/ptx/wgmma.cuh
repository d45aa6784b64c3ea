// Ordering of warpgroup matrix instructions and of their registers, and the descriptor of an
// operand in shared memory (PTX ISA, Asynchronous Warpgroup Level Matrix Instructions).
#pragma once

#include "base/host_device.h"

namespace narrowfloat {

// wgmma.fence: orders earlier accesses to the registers of the next instructions.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// wgmma.commit_group: closes a group of instructions.
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// wgmma.wait_group 0: waits for all groups.
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
// wgmma.wait_group 1: waits for all groups but the one committed last.
__device__ inline void wgmma_wait_but_one() {
  asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
}

// The descriptor of [rows][128 bytes] in shared memory in the 128-byte swizzle: 16-byte chunk c of
// row r lies at c ^ (r % 8). `address` is a multiple of 1024; the next 32 bytes, the k of one
// instruction, are 2 more in the descriptor.
__device__ inline uint64_t swizzled_descriptor(uint32_t address) {
  constexpr uint64_t kLeadingBytes = 1;    // Unused with a swizzle.
  constexpr uint64_t kStride = 1024 / 16;  // Stride from 8 rows to the next.
  constexpr uint64_t kSwizzle128 = 1;
  return (address & 0x3FFFFU) >> 4 | kLeadingBytes << 16 | kStride << 32 | kSwizzle128 << 62;
}

// setmaxnreg: sets the registers of each thread of this warpgroup from here on.
template <int kCount>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace narrowfloat
