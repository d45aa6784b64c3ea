// TMA copies of boxes of a tensor between global and shared memory, one instruction per function.
// `map` is a TensorMap (runtime/cuda/tensor_map.h) in the parameters of the kernel; coordinates
// count elements, the innermost first. Elements outside the tensor are loaded as zeros and not
// stored. Shared addresses are multiples of 128, or of 1024 with a swizzle.
#pragma once

#include "base/host_device.h"

namespace narrowfloat {

// elect.sync: true in one lane of a whole warp, always the same one. It tells the compiler that one
// thread goes on, so that it takes a copy's operands from that thread; otherwise it makes a loop
// over lanes of every copy.
__device__ inline bool is_elected_lane() {
  uint32_t is_elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xFFFFFFFF; selp.b32 %0, 1, 0, p;}"
               : "=r"(is_elected)
               :
               : "memory");
  return is_elected != 0;
}

// cp.async.bulk.tensor of 2 dimensions: completes on `barrier` with the bytes of the whole box.
__device__ inline void copy_box(uint32_t shared, const void* map, int x, int y, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}

// cp.async.bulk.tensor of 3 dimensions.
__device__ inline void copy_box(uint32_t shared, const void* map, int x, int y, int z,
                                uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

// cp.async.bulk.tensor with multicast to the CTAs of a cluster, bit i of `ranks` for CTA i: each
// receives the box at the same offset of its shared memory, and it completes on its barrier at the
// same offset.
__device__ inline void copy_box_to_blocks(uint32_t shared, const void* map, int x, int y, int z,
                                          uint32_t barrier, uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(ranks)
      : "memory");
}

// cp.async.bulk.tensor to global memory, of 2 or 3 dimensions. Other threads call
// fence_async_proxy() after they write the box to shared memory.
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

// cp.async.bulk.wait_group.read 0: waits until all groups of this thread have read shared memory.
__device__ inline void wait_for_boxes_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

}  // namespace narrowfloat
