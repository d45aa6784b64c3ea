// The driver encodes tensor maps (driver_function.h).
#include "runtime/cuda/tensor_map.h"

#include <cstring>
#include <cuda.h>

#include "base/throw_error.h"
#include "runtime/cuda/driver_function.h"

namespace narrowfloat {
namespace {

CUtensorMapDataType type_of(int element_bytes) {
  if (element_bytes == 4) return CU_TENSOR_MAP_DATA_TYPE_UINT32;
  return element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
}

}  // namespace

TensorMap make_tensor_map(const TensorMapLayout& layout) {
  static const auto kEncode =
      driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  std::array<cuuint64_t, 3> extents{};
  std::array<cuuint64_t, 2> strides{};
  std::array<cuuint32_t, 3> box{};
  const std::array<cuuint32_t, 3> steps{1, 1, 1};
  for (size_t i = 0; i < extents.size(); ++i) {
    extents.at(i) = static_cast<cuuint64_t>(layout.extents.at(i));
    box.at(i) = static_cast<cuuint32_t>(layout.box.at(i));
    if (i > 0) strides.at(i - 1) = static_cast<cuuint64_t>(layout.strides.at(i - 1));
  }
  CUtensorMap map;
  const CUresult status =
      kEncode(&map, type_of(layout.element_bytes), static_cast<cuuint32_t>(layout.dimensions),
              const_cast<void*>(layout.data), extents.data(), strides.data(), box.data(),
              steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
              layout.is_swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
              CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw_error(ErrorKind::kDevice, "cuTensorMapEncodeTiled: CUDA error {}",
                static_cast<int>(status));
  }
  TensorMap result;
  static_assert(sizeof(result.bytes) == sizeof(map));
  std::memcpy(result.bytes.data(), &map, sizeof(map));
  return result;
}

}  // namespace narrowfloat
