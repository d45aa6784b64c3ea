// Copies from global to shared memory that run beside the thread, one instruction per function.
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

// The same to several blocks of a cluster, bit i of `ranks` for block i: to the same place in the
// shared memory of each, where it completes on the barrier of the same place.
__device__ inline void copy_bulk_to_blocks(uint32_t shared, const void* global, uint32_t bytes,
                                           uint32_t barrier, uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared),
      "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(barrier), "h"(ranks)
      : "memory");
}

// cp.async of 16 bytes, past L1: the first `bytes` (0 or 16) from memory, the rest zeros.
__device__ inline void copy_16(uint32_t shared, const void* global, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared),
               "l"(__cvta_generic_to_global(global)), "r"(bytes)
               : "memory");
}

// The same of 4 bytes.
__device__ inline void copy_4(uint32_t shared, const void* global, uint32_t bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared),
               "l"(__cvta_generic_to_global(global)), "r"(bytes)
               : "memory");
}

// cp.async of 16 bytes, past L1.
__device__ inline void copy_16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared),
               "l"(__cvta_generic_to_global(global))
               : "memory");
}

// cp.async.wait_all: until all copies of this thread that complete on no barrier have arrived.
__device__ inline void wait_for_async_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace narrowfloat
