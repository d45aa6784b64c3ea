// What the tensor copies of Hopper (device/ptx/tensor_copy.cuh) know of a tensor in global memory:
// made on the host, passed to a kernel as a parameter.
#pragma once

#include <array>
#include <cstdint>

namespace narrowfloat {

// A CUtensorMap, of which the CUDA driver's headers alone say more.
struct alignas(64) TensorMap {
  std::array<uint8_t, 128> bytes;
};

// Dimensions and boxes in elements, the innermost first; absent ones are 1.
struct TensorMapLayout {
  const void* data = nullptr;  // A multiple of 16.
  int element_bytes = 1;       // 1, 2 or 4; copied as they are.
  int dimensions = 2;
  std::array<int64_t, 3> extents{1, 1, 1};  // Below 2^32.
  std::array<int64_t, 2> strides{};         // Bytes, of the outer ones; multiples of 16.
  std::array<int, 3> box{1, 1, 1};          // At most 256 each.
  bool is_swizzled = false;  // Rows of a box, of 128 bytes then, in the 128-byte swizzle.
};

// Allocates nothing on the device and waits for nothing. Throws kDevice where the driver refuses.
TensorMap make_tensor_map(const TensorMapLayout& layout);

}  // namespace narrowfloat
