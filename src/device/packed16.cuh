// Two 16-bit floats in a word, the lower half first: widening to fp32 is exact, narrowing rounds to
// nearest even with the canonical NaN (spec 4.6).
#pragma once

#include "base/host_device.h"
#include "device/ptx/convert.cuh"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

struct PackedBf16 {
  static constexpr DType kDType = DType::kBF16;
  __device__ static float low(uint32_t pair) { return bits_float(pair << 16); }
  __device__ static float high(uint32_t pair) { return bits_float(pair & 0xFFFF0000U); }
  __device__ static uint32_t pack(float low, float high) { return to_bf16x2(low, high); }
};

struct PackedF16 {
  static constexpr DType kDType = DType::kF16;
  __device__ static float low(uint32_t pair) { return f16_low_to_float(pair); }
  __device__ static float high(uint32_t pair) { return f16_high_to_float(pair); }
  __device__ static uint32_t pack(float low, float high) { return to_f16x2(low, high); }
};

}  // namespace narrowfloat
