// Copies of boxes of a tensor between global and shared memory, which run beside the thread, one
// instruction per function. `map` is a TensorMap (runtime/cuda/tensor_map.h) in the parameters of
// the kernel; coordinates count elements, the innermost first. What lies outside the tensor becomes
// zeros and is not stored. Shared addresses are multiples of 128, in a swizzle of 1024.
#pragma once

#include "base/host_device.h"

namespace narrowfloat {

// cp.async.bulk.tensor of 2 dimensions: completes on `barrier`, with the bytes of the whole box.
__device__ inline void copy_box(uint32_t shared, const void* map, int x, int y, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}

// Of 3 dimensions.
__device__ inline void copy_box(uint32_t shared, const void* map, int x, int y, int z,
                                uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

// The same to several blocks of a cluster, bit i of `ranks` for block i: to the same place in the
// shared memory of each, where it completes on the barrier of the same place.
__device__ inline void copy_box_to_blocks(uint32_t shared, const void* map, int x, int y, int z,
                                          uint32_t barrier, uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(ranks)
      : "memory");
}

// cp.async.bulk.tensor to global memory, of 2 or 3 dimensions. What other threads wrote to shared
// memory needs a fence_async_proxy() of theirs first.
__device__ inline void store_box(const void* map, int x, int y, uint32_t shared) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
      "r"(x), "r"(y), "r"(shared)
      : "memory");
}

__device__ inline void store_box(const void* map, int x, int y, int z, uint32_t shared) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map),
      "r"(x), "r"(y), "r"(z), "r"(shared)
      : "memory");
}

// cp.async.bulk.commit_group: closes a group of this thread's stores.
__device__ inline void commit_boxes() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// cp.async.bulk.wait_group.read 0: all groups of this thread have read shared memory.
__device__ inline void wait_for_boxes_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

}  // namespace narrowfloat
