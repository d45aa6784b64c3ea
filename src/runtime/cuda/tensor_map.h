// The TMA descriptor of a tensor in global memory (device/ptx/tensor_copy.cuh): made on the host,
// passed to a kernel as a parameter.
#pragma once

#include <array>
#include <cstdint>

namespace narrowfloat {

// A CUtensorMap without the CUDA driver's header.
struct alignas(64) TensorMap {
  std::array<uint8_t, 128> bytes;
};

// Dimensions and boxes in elements, the innermost first; absent ones are 1.
struct TensorMapLayout {
  const void* data = nullptr;  // A multiple of 16.
  int element_bytes = 1;       // 1, 2 or 4; copied as they are.
  int dimensions = 2;
  std::array<int64_t, 3> extents{1, 1, 1};  // Below 2^32.
  std::array<int64_t, 2> strides{};         // Bytes, outer dimensions; multiples of 16.
  std::array<int, 3> box{1, 1, 1};          // At most 256 each.
  bool is_swizzled = false;  // Rows of a box have 128 bytes, in the 128-byte swizzle.
};

// Allocates nothing on the device and does not synchronize. Throws kDevice where the driver
// refuses.
TensorMap make_tensor_map(const TensorMapLayout& layout);

}  // namespace narrowfloat
