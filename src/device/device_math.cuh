// The arithmetic of both math modes on the GPU: policies with the results of ExactMath and FastMath
// (formats/math_policy.h) bit for bit, built from single instructions.
#pragma once

#include <type_traits>

#include "device/ptx/convert.cuh"
#include "device/ptx/float_ops.cuh"
#include "formats/math_policy.h"
#include "formats/minifloat.h"

namespace narrowfloat {

namespace device_math_detail {

// The conversion instructions return NaN as 0x7F or 0x7 whatever the sign of the operand. All other
// rules are those of the type.
template <class Float>
__device__ inline uint8_t encode(float a) {
  if constexpr (std::is_same_v<Float, E4M3>) {
    return to_e4m3(a);
  } else if constexpr (std::is_same_v<Float, E2M1> && kHasE2m1Conversion) {
    return static_cast<uint8_t>(to_e2m1x8({a}));
  } else {
    return Float::encode(a);
  }
}

// Converts through fp16, which holds every E4M3 number. NaN only enters arithmetic, which returns
// the canonical NaN.
template <class Float>
__device__ inline float decode(uint8_t code) {
  if constexpr (std::is_same_v<Float, E4M3>) return f16_low_to_float(e4m3x2_to_f16x2(code));
  return Float::decode(code);
}

}  // namespace device_math_detail

struct DeviceExactMath {
  static constexpr MathMode kMode = MathMode::kExact;
  __device__ static float mul(float a, float b) { return __fmul_rn(a, b); }
  __device__ static float add(float a, float b) { return __fadd_rn(a, b); }
  __device__ static float div(float a, float b) { return __fdiv_rn(a, b); }
  __device__ static float rcp(float a) { return __frcp_rn(a); }
  __device__ static float flush(float a) { return a; }
  template <class Float>
  __device__ static uint8_t encode(float a) {
    return device_math_detail::encode<Float>(a);
  }
  template <class Float>
  __device__ static float decode(uint8_t code) {
    return device_math_detail::decode<Float>(code);
  }
};

struct DeviceFastMath {
  static constexpr MathMode kMode = MathMode::kFast;
  __device__ static float flush(float a) {
    return is_denormal_or_zero(a) ? bits_float(float_bits(a) & 0x80000000U) : a;
  }
  __device__ static float mul(float a, float b) { return mul_ftz(a, b); }
  __device__ static float add(float a, float b) { return add_ftz(a, b); }
  __device__ static float div(float a, float b) { return div_ftz(a, b); }
  __device__ static float rcp(float a) { return rcp_approx(a); }
  template <class Float>
  __device__ static uint8_t encode(float a) {
    return device_math_detail::encode<Float>(a);
  }
  template <class Float>
  __device__ static float decode(uint8_t code) {
    return device_math_detail::decode<Float>(code);
  }
};

}  // namespace narrowfloat
