// Two 16-bit floats in a word, the lower half first: widening to fp32 is exact, narrowing rounds to
// nearest even with the canonical NaN (spec 4.6).
#pragma once

#include "base/host_device.h"
#include "device/ptx/convert.cuh"
#include "device/ptx/packed.cuh"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

struct PackedBf16 {
  static constexpr DType kDType = DType::kBF16;
  __device__ static float low(uint32_t pair) { return bits_float(pair << 16); }
  __device__ static float high(uint32_t pair) { return bits_float(pair & 0xFFFF0000U); }
  __device__ static uint32_t pack(float low, float high) { return to_bf16x2(low, high); }
  // The larger magnitude in each half, with an arbitrary sign. max_number: a number wins over NaN;
  // max_or_nan: NaN wins.
  __device__ static uint32_t max_number(uint32_t a, uint32_t b) { return max_abs_bf16x2(a, b); }
  __device__ static uint32_t max_or_nan(uint32_t a, uint32_t b) { return max_abs_nan_bf16x2(a, b); }
  __device__ static uint32_t add(uint32_t a, uint32_t b) { return add_bf16x2(a, b); }
};

struct PackedF16 {
  static constexpr DType kDType = DType::kF16;
  __device__ static float low(uint32_t pair) { return f16_low_to_float(pair); }
  __device__ static float high(uint32_t pair) { return f16_high_to_float(pair); }
  __device__ static uint32_t pack(float low, float high) { return to_f16x2(low, high); }
  __device__ static uint32_t max_number(uint32_t a, uint32_t b) { return max_abs_f16x2(a, b); }
  __device__ static uint32_t max_or_nan(uint32_t a, uint32_t b) { return max_abs_nan_f16x2(a, b); }
  __device__ static uint32_t add(uint32_t a, uint32_t b) { return add_f16x2(a, b); }
};

}  // namespace narrowfloat
