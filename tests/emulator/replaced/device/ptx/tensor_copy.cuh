// Emulated: src/device/ptx/tensor_copy.cuh.
#pragma once

#include <array>

#include "base/host_device.h"
#include "emulator/machine.h"
#include "emulator/tensor_maps.h"

namespace narrowfloat {

inline bool is_elected_lane() { return emulator::lane() == 0; }

inline void emulated_copy_box(uint32_t shared, const void* map, std::array<int, 3> at,
                              uint32_t barrier, uint16_t ranks) {
  // A copy of the map: it is in the thread's parameters, and the thread may end first.
  const emulator::EncodedMap encoded = *emulator::encoded_map(map);
  const auto copy = [=, cluster = emulator::cluster_size()] {
    for (uint32_t rank = 0; rank < cluster; ++rank) {
      if ((ranks >> rank & 1U) != 0) emulator::load_box(encoded, at, rank, shared);
    }
  };
  emulator::copy_to_barrier(copy, ranks, barrier, emulator::box_bytes(encoded));
}
inline void copy_box(uint32_t shared, const void* map, int x, int y, uint32_t barrier) {
  emulated_copy_box(shared, map, {x, y, 0}, barrier, emulator::own_rank());
}
inline void copy_box(uint32_t shared, const void* map, int x, int y, int z, uint32_t barrier) {
  emulated_copy_box(shared, map, {x, y, z}, barrier, emulator::own_rank());
}
inline void copy_box_to_blocks(uint32_t shared, const void* map, int x, int y, int z,
                               uint32_t barrier, uint16_t ranks) {
  emulated_copy_box(shared, map, {x, y, z}, barrier, ranks);
}
inline void emulated_store_box(const void* map, std::array<int, 3> at, uint32_t shared) {
  const emulator::EncodedMap encoded = *emulator::encoded_map(map);
  const uint32_t rank = emulator::cluster_rank();
  emulator::store_async([=] { emulator::store_box(encoded, at, rank, shared); });
}
inline void store_box(const void* map, int x, int y, uint32_t shared) {
  emulated_store_box(map, {x, y, 0}, shared);
}
inline void store_box(const void* map, int x, int y, int z, uint32_t shared) {
  emulated_store_box(map, {x, y, z}, shared);
}
inline void commit_boxes() {}
inline void wait_for_boxes_read() { emulator::wait_for_stores(); }

}  // namespace narrowfloat
