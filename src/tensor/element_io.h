// Reading and writing runs of elements of the high-precision types as fp32. Widening is exact;
// narrowing rounds once to nearest even (NaN becomes the type's canonical NaN).
#pragma once

#include <cstring>

#include "base/float_ops.h"
#include "base/throw_error.h"
#include "formats/float16.h"
#include "formats/minifloat.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

// `first` points at the first element. dtype: F32, F16, BF16, F8_E4M3.
inline void widen(DType dtype, const void* first, int64_t count, float* out) {
  switch (dtype) {
    case DType::kF32:
      if (count > 0) std::memcpy(out, first, static_cast<size_t>(count) * sizeof(float));
      return;
    case DType::kF16: {
      const auto* in = static_cast<const uint16_t*>(first);
      for (int64_t i = 0; i < count; ++i) out[i] = f16_to_float(in[i]);
      return;
    }
    case DType::kBF16: {
      const auto* in = static_cast<const uint16_t*>(first);
      for (int64_t i = 0; i < count; ++i) out[i] = bf16_to_float(in[i]);
      return;
    }
    case DType::kF8E4M3: {
      const auto* in = static_cast<const uint8_t*>(first);
      for (int64_t i = 0; i < count; ++i) out[i] = E4M3::decode(in[i]);
      return;
    }
    default:
      throw_invalid("dtype: expected F32, F16, BF16 or F8_E4M3, got {}", name(dtype));
  }
}

// dtype: F32, F16, BF16.
inline void narrow(DType dtype, const float* in, int64_t count, void* first) {
  switch (dtype) {
    case DType::kF32: {
      auto* out = static_cast<float*>(first);
      for (int64_t i = 0; i < count; ++i) out[i] = canonical_nan(in[i]);
      return;
    }
    case DType::kF16: {
      auto* out = static_cast<uint16_t*>(first);
      for (int64_t i = 0; i < count; ++i) out[i] = float_to_f16(in[i]);
      return;
    }
    case DType::kBF16: {
      auto* out = static_cast<uint16_t*>(first);
      for (int64_t i = 0; i < count; ++i) out[i] = float_to_bf16(in[i]);
      return;
    }
    default:
      throw_invalid("dtype: expected F32, F16 or BF16, got {}", name(dtype));
  }
}

// RN16 in place: the values that a 16-bit tensor would hold, as fp32.
inline void round_through(DType dtype, float* values, int64_t count) {
  if (dtype == DType::kF16) {
    for (int64_t i = 0; i < count; ++i) values[i] = f16_to_float(float_to_f16(values[i]));
  } else if (dtype == DType::kBF16) {
    for (int64_t i = 0; i < count; ++i) values[i] = bf16_to_float(float_to_bf16(values[i]));
  }
}

// Largest finite number of an input type, a parameter of block rules (spec 6.7); FLT_MAX for all
// but the 16-bit types.
inline float largest_finite(DType dtype) {
  if (dtype == DType::kBF16) return bits_float(0x7F7F0000U);
  if (dtype == DType::kF16) return 65504.0F;
  return kFloatMax;
}

// Bytes of one element of a type with whole bytes.
inline int64_t element_bytes(DType dtype) { return bits(dtype) / 8; }

inline const void* element_pointer(const void* base, DType dtype, int64_t index) {
  return static_cast<const char*>(base) + index * element_bytes(dtype);
}
inline void* element_pointer(void* base, DType dtype, int64_t index) {
  return static_cast<char*>(base) + index * element_bytes(dtype);
}

}  // namespace narrowfloat
