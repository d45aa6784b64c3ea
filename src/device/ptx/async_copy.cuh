// Asynchronous copies from global to shared memory, one instruction per function.
#pragma once

#include "base/host_device.h"

namespace narrowfloat {

// cp.async.bulk: `bytes` in multiples of 16, both addresses aligned to 16. Completes on `barrier`.
__device__ inline void copy_bulk(uint32_t shared, const void* global, uint32_t bytes,
                                 uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(barrier)
      : "memory");
}

// The same of bytes that nobody reads again soon: they leave L2 before others do.
__device__ inline void copy_bulk_once(uint32_t shared, const void* global, uint32_t bytes,
                                      uint32_t barrier) {
  constexpr uint64_t kEvictFirst = 0x12F0000000000000U;  // createpolicy.fractional.L2::evict_first
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared),
      "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(barrier), "l"(kEvictFirst)
      : "memory");
}

// cp.async.bulk with multicast to the CTAs of a cluster, bit i of `ranks` for CTA i: each receives
// the bytes at the same offset of its shared memory, and they complete on its barrier at the same
// offset.
__device__ inline void copy_bulk_to_blocks(uint32_t shared, const void* global, uint32_t bytes,
                                           uint32_t barrier, uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared),
      "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(barrier), "h"(ranks)
      : "memory");
}

// cp.async of 16 bytes, bypassing L1: the first `bytes` (0 or 16) from memory, the rest zeros.
__device__ inline void copy_16(uint32_t shared, const void* global, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared),
               "l"(__cvta_generic_to_global(global)), "r"(bytes)
               : "memory");
}

// cp.async of 4 bytes, of which the first `bytes` (0 or 4) come from memory.
__device__ inline void copy_4(uint32_t shared, const void* global, uint32_t bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared),
               "l"(__cvta_generic_to_global(global)), "r"(bytes)
               : "memory");
}

// cp.async of 16 bytes, bypassing L1.
__device__ inline void copy_16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared),
               "l"(__cvta_generic_to_global(global))
               : "memory");
}

// cp.async.commit_group: the copies of this thread since the last one are a group.
__device__ inline void end_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// cp.async.wait_group: waits for all groups of this thread but the newest kNewest.
template <int kNewest>
__device__ inline void wait_for_copy_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewest) : "memory");
}

// cp.async.wait_all: waits for all copies of this thread that complete on no barrier.
__device__ inline void wait_for_async_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace narrowfloat
