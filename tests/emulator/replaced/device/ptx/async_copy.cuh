// Emulated: src/device/ptx/async_copy.cuh.
#pragma once

#include "base/host_device.h"
#include "emulator/machine.h"

namespace narrowfloat {

inline void copy_bulk_to_blocks(uint32_t shared, const void* global, uint32_t bytes,
                                uint32_t barrier, uint16_t ranks) {
  const auto copy = [=, cluster = emulator::cluster_size()] {
    for (uint32_t rank = 0; rank < cluster; ++rank) {
      if ((ranks >> rank & 1U) == 0) continue;
      std::memcpy(emulator::shared_memory_of(rank, shared, bytes), global, bytes);
    }
  };
  emulator::require(bytes % 16 == 0 && shared % 16 == 0 && emulator::is_aligned(global, 16),
                    "a bulk copy that is not of multiples of 16 bytes");
  emulator::copy_to_barrier(copy, ranks, barrier, bytes);
}
inline void copy_bulk(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
  copy_bulk_to_blocks(shared, global, bytes, barrier, emulator::own_rank());
}

inline void copy_bulk_once(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
  copy_bulk(shared, global, bytes, barrier);
}

template <uint32_t kBytes>
void emulated_copy(uint32_t shared, const void* global, uint32_t bytes) {
  uint8_t* to = emulator::shared_memory(shared, kBytes);
  emulator::require(shared % kBytes == 0 && (bytes == 0 || emulator::is_aligned(global, kBytes)),
                    "a copy between addresses that are not multiples of its size");
  emulator::copy_async([=] {
    std::memset(to, 0, kBytes);
    if (bytes > 0) std::memcpy(to, global, bytes);
  });
}
inline void copy_16(uint32_t shared, const void* global, uint32_t bytes) {
  emulated_copy<16>(shared, global, bytes);
}
inline void copy_4(uint32_t shared, const void* global, uint32_t bytes) {
  emulated_copy<4>(shared, global, bytes);
}
inline void copy_16(uint32_t shared, const void* global) { emulated_copy<16>(shared, global, 16); }

inline void end_copy_group() { emulator::end_copy_group(); }
template <int kNewest>
void wait_for_copy_groups() {
  emulator::wait_for_copy_groups(kNewest);
}
inline void wait_for_async_copies() { emulator::wait_for_copies(); }

}  // namespace narrowfloat
