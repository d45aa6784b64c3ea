// Thread block clusters: CTAs that run at the same time, synchronize with each other, and access
// each other's shared memory. A kernel that is launched without clusters has clusters of one CTA.
#pragma once

#include "base/host_device.h"

namespace narrowfloat {

// %cluster_ctarank: rank of this CTA in its cluster.
__device__ inline uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// %cluster_nctarank: CTAs of a cluster.
__device__ inline uint32_t cluster_size() {
  uint32_t size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// barrier.cluster.arrive: release of this thread's writes to the threads that wait.
__device__ inline void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// barrier.cluster.wait: waits until all threads of the cluster have arrived or exited.
__device__ inline void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// mapa and st.shared::cluster: stores at the same offset in the shared memory of CTA `rank`, which
// must have started and not have exited.
__device__ inline void store_in_block(uint32_t shared, uint32_t rank, uint32_t value) {
  asm volatile(
      "{.reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1; "
      "st.shared::cluster.u32 [remote], %2;}" ::"r"(shared),
      "r"(rank), "r"(value)
      : "memory");
}

// mapa and mbarrier.arrive.shared::cluster: arrives at the barrier at the same offset in CTA
// `rank`. It signals that this thread has read; writes of this thread need a wider release.
__device__ inline void arrive_in_block(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{.reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1; "
      "mbarrier.arrive.shared::cluster.b64 _, [remote];}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// Predicated arrive_in_block(), without a branch.
__device__ inline void arrive_in_block_if(bool arrives, uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{.reg .b32 remote; .reg .pred arrives; mapa.shared::cluster.u32 remote, %0, %1; "
      "setp.ne.u32 arrives, %2, 0; "
      "@arrives mbarrier.arrive.shared::cluster.b64 _, [remote];}" ::"r"(barrier),
      "r"(rank), "r"(static_cast<uint32_t>(arrives))
      : "memory");
}

// st.async: stores 4 bytes at the same offset in CTA `rank`; they complete on that CTA's barrier.
__device__ inline void send_to_block(uint32_t shared, uint32_t rank, uint32_t value,
                                     uint32_t barrier) {
  asm volatile(
      "{.reg .b32 remote, done; mapa.shared::cluster.u32 remote, %0, %1; "
      "mapa.shared::cluster.u32 done, %3, %1; "
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [remote], %2, [done];}" ::"r"(
          shared),
      "r"(rank), "r"(value), "r"(barrier)
      : "memory");
}

}  // namespace narrowfloat
