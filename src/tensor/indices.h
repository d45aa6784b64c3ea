// A vector of indices of either integer width, read the same way on CPU and GPU.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

struct Indices {
  const void* data = nullptr;
  bool is_wide = false;  // I64, else I32.

  NF_HOST_DEVICE int64_t operator[](int64_t i) const {
    if (is_wide) return static_cast<const int64_t*>(data)[i];
    return static_cast<const int32_t*>(data)[i];
  }
};

inline Indices indices_of(const TensorView& view) {
  return {.data = view.data, .is_wide = view.dtype == DType::kI64};
}

}  // namespace narrowfloat
