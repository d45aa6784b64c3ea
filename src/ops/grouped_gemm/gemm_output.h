// Rounds a result to the output type: once, and every NaN to the type's canonical one.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/host_device.h"
#include "formats/float16.h"
#include "narrowfloat/moe_types.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

inline void store_result(DType dtype, float value, int64_t index, void* output) {
  if (dtype == DType::kBF16) {
    static_cast<uint16_t*>(output)[index] = float_to_bf16(value);
  } else {
    static_cast<float*>(output)[index] = canonical_nan(value);
  }
}

inline void store_result(DType dtype, double value, int64_t index, void* output) {
  if (dtype == DType::kBF16) {
    static_cast<uint16_t*>(output)[index] = double_to_bf16(value);
  } else if (dtype == DType::kF32) {
    static_cast<float*>(output)[index] = canonical_nan(static_cast<float>(value));
  } else {
    const double canonical = bit_cast<double>(uint64_t{0x7FFFFFFFFFFFFFFF});
    static_cast<double*>(output)[index] = std::isnan(value) ? canonical : value;
  }
}

// Stores results side by side; the type is looked at once.
template <typename Real>
void store_results(DType dtype, const Real* values, int64_t count, int64_t index, void* output) {
  const auto store_as = [&](DType type) {
    for (int64_t i = 0; i < count; ++i) store_result(type, values[i], index + i, output);
  };
  if (dtype == DType::kBF16) return store_as(DType::kBF16);
  if (dtype == DType::kF32) return store_as(DType::kF32);
  store_as(dtype);
}

// True for the weight rows of the gate half (moe spec 1.3).
NF_HOST_DEVICE inline bool is_gate_row(GateOrder order, int64_t row, int64_t rows) {
  if (order == GateOrder::kInterleaved) return row % 2 == 0;
  const bool is_first_half = row < rows / 2;
  return is_first_half == (order == GateOrder::kGateUp);
}

}  // namespace narrowfloat
