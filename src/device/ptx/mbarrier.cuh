// Barriers in shared memory that count arrivals and bytes, one instruction per function (PTX ISA,
// mbarrier). Addresses are those of the shared window: shared_address().
#pragma once

#include "device/ptx/shared_memory.cuh"

namespace narrowfloat {

__device__ inline void init_barrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// fence.mbarrier_init: makes initialised barriers visible to bulk copies. Call it before a CTA
// barrier.
__device__ inline void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void arrive(uint32_t barrier) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0];}" ::"r"(barrier)
               : "memory");
}

// Arrives once and announces `bytes` of bulk copies that must complete before the phase can end.
__device__ inline void arrive_and_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile(
      "{.reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;}" ::"r"(
          barrier),
      "r"(bytes)
      : "memory");
}

// Whether the phase of this parity has ended; may suspend the thread for a while.
__device__ inline bool try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// The same, but the thread sleeps until the phase ends, 10 ms at most, instead of taking
// instruction slots of other warps.
__device__ inline bool try_wait_asleep(uint32_t barrier, uint32_t parity) {
  constexpr uint32_t kNanoseconds = 10'000'000;
  uint32_t done;
  asm volatile(
      "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3; selp.b32 %0, 1, 0, "
      "p;}"
      : "=r"(done)
      : "r"(barrier), "r"(parity), "r"(kNanoseconds)
      : "memory");
  return done != 0;
}

// cp.async.mbarrier.arrive.noinc: arrives once all earlier cp.async of this thread are complete.
__device__ inline void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// fence.proxy.async: orders this thread's shared memory accesses before later ones of the async
// proxy (wgmma, bulk copies).
__device__ inline void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// bar.sync: waits for the `threads` threads that use barrier `id` (1 to 15; 0 is __syncthreads()).
__device__ inline void sync_threads(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace narrowfloat
