// Rounding of a result to the output type: once, and every NaN to the type's canonical one.
#pragma once

#include <cmath>
#include <cstdint>

#include "formats/float16.h"
#include "narrowfloat/moe_types.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

// Rounds to odd: a result whose low bit says "inexact" rounds on to a shorter type as the double
// itself would have.
inline float round_to_odd(double value) {
  const auto nearest = static_cast<float>(value);
  const auto widened = static_cast<double>(nearest);
  if (widened == value || std::isnan(value)) return nearest;
  const bool went_up = std::abs(widened) > std::abs(value);
  return bits_float((float_bits(nearest) - (went_up ? 1U : 0U)) | 1U);
}

inline void store_result(DType dtype, float value, int64_t index, void* output) {
  if (dtype == DType::kBF16) {
    static_cast<uint16_t*>(output)[index] = float_to_bf16(value);
  } else {
    static_cast<float*>(output)[index] = canonical_nan(value);
  }
}

inline void store_result(DType dtype, double value, int64_t index, void* output) {
  if (dtype == DType::kBF16) {
    static_cast<uint16_t*>(output)[index] = float_to_bf16(round_to_odd(value));
  } else if (dtype == DType::kF32) {
    static_cast<float*>(output)[index] = canonical_nan(static_cast<float>(value));
  } else {
    const double canonical = bit_cast<double>(uint64_t{0x7FFFFFFFFFFFFFFF});
    static_cast<double*>(output)[index] = std::isnan(value) ? canonical : value;
  }
}

// True for the weight rows of the gate half (moe spec 1.3).
inline bool is_gate_row(GateOrder order, int64_t row, int64_t rows) {
  if (order == GateOrder::kInterleaved) return row % 2 == 0;
  const bool is_first_half = row < rows / 2;
  return is_first_half == (order == GateOrder::kGateUp);
}

}  // namespace narrowfloat
