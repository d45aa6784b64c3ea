// Thread block clusters: blocks that run at the same time, wait for each other, and write each
// other's shared memory. A kernel that is launched without clusters is in clusters of one block.
#pragma once

#include "base/host_device.h"

namespace narrowfloat {

// %cluster_ctarank: this block's place in its cluster.
__device__ inline uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// %cluster_nctarank: blocks of a cluster.
__device__ inline uint32_t cluster_size() {
  uint32_t size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// barrier.cluster.arrive: this thread is here; what it wrote is visible to those that wait.
__device__ inline void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// barrier.cluster.wait: until all threads of the cluster have arrived or ended.
__device__ inline void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// mapa and st.shared::cluster: to the same place in the shared memory of block `rank`, which must
// have started and not have ended.
__device__ inline void store_in_block(uint32_t shared, uint32_t rank, uint32_t value) {
  asm volatile(
      "{.reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1; "
      "st.shared::cluster.u32 [remote], %2;}" ::"r"(shared),
      "r"(rank), "r"(value)
      : "memory");
}

// mapa and mbarrier.arrive.shared::cluster: at the barrier of the same place in block `rank`. Says
// that this thread has read; for what it has written, others need a wider release.
__device__ inline void arrive_in_block(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{.reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1; "
      "mbarrier.arrive.shared::cluster.b64 _, [remote];}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// The same by the threads for which `arrives`, without a branch.
__device__ inline void arrive_in_block_if(bool arrives, uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{.reg .b32 remote; .reg .pred arrives; mapa.shared::cluster.u32 remote, %0, %1; "
      "setp.ne.u32 arrives, %2, 0; "
      "@arrives mbarrier.arrive.shared::cluster.b64 _, [remote];}" ::"r"(barrier),
      "r"(rank), "r"(static_cast<uint32_t>(arrives))
      : "memory");
}

// st.async: 4 bytes to the same place in block `rank`, which complete on its barrier there.
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
