// The contents of a map that cuTensorMapEncodeTiled() makes here, and copies of boxes that follow
// it.
#pragma once

#include <array>
#include <cstdint>

namespace emulator {

struct EncodedMap {
  uint8_t* data;
  uint32_t element_bytes;
  uint32_t dimensions;
  std::array<uint64_t, 3> extents;
  std::array<uint64_t, 3> strides;  // Bytes.
  std::array<uint32_t, 3> box;
  uint32_t is_swizzled;
  uint32_t mark;
};
static_assert(sizeof(EncodedMap) <= 128);

const EncodedMap* encoded_map(const void* map);
uint32_t box_bytes(const EncodedMap& map);
void load_box(const EncodedMap& map, const std::array<int, 3>& at, uint32_t rank, uint32_t shared);
void store_box(const EncodedMap& map, const std::array<int, 3>& at, uint32_t rank, uint32_t shared);

}  // namespace emulator
