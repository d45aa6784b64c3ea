// Single IEEE operations on fp32 and double: one rounding each, nearest even, denormals kept, never
// contracted. Intrinsics ensure this on CUDA, -ffp-contract=off on the host.
#pragma once

#include <cmath>

#include "base/host_device.h"

namespace narrowfloat {

inline constexpr float kFloatMax = 0x1.fffffep127F;

NF_HOST_DEVICE inline float mul_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

NF_HOST_DEVICE inline float add_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

NF_HOST_DEVICE inline float div_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

NF_HOST_DEVICE inline float fma_rn(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

// a / divisor, correctly rounded while nothing under- or overflows (Markstein 1990; equal to the
// division for all significands and the divisors 1, 6, 1536 and 2688). reciprocal: RN(1 / divisor).
NF_HOST_DEVICE inline float divide_by_known(float a, float divisor, float reciprocal) {
  const float quotient = mul_rn(a, reciprocal);
  const float remainder = fma_rn(-divisor, quotient, a);
  return fma_rn(remainder, reciprocal, quotient);
}

NF_HOST_DEVICE inline double mul_rn(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

NF_HOST_DEVICE inline double add_rn(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dadd_rn(a, b);
#else
  return a + b;
#endif
}

NF_HOST_DEVICE inline double div_rn(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __ddiv_rn(a, b);
#else
  return a / b;
#endif
}

// Correctly rounded 1 / sqrt(x). The host expression equals exact integer arithmetic for all
// significands (spec allreduce 3.4); 1.0f / sqrtf(x) does not.
NF_HOST_DEVICE inline float rsqrt_rn(float x) {
#if defined(__CUDA_ARCH__)
  return __frsqrt_rn(x);
#else
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x)));
#endif
}

NF_HOST_DEVICE inline bool is_nan(float x) { return (float_bits(x) & 0x7FFFFFFFU) > 0x7F800000U; }
NF_HOST_DEVICE inline bool is_denormal_or_zero(float x) {
  return (float_bits(x) & 0x7F800000U) == 0;
}

// A number wins over NaN. The function uses comparisons because std::fmin and std::fmax return NaN
// for a signalling NaN (spec 4.5).
NF_HOST_DEVICE inline float min_number(float a, float b) {
  if (is_nan(a)) return b;
  return b < a ? b : a;
}
NF_HOST_DEVICE inline float max_number(float a, float b) {
  if (is_nan(a)) return b;
  return b > a ? b : a;
}

// A running maximum of |x| over elements that are numbers, kept as a bit pattern so that its order
// does not matter and NaN payloads cannot interfere (spec 4.5). Free of branches, so that loops
// over it vectorise.
class AbsMax {
 public:
  NF_HOST_DEVICE void add(float x) {
    const auto magnitude = static_cast<int32_t>(float_bits(x) & 0x7FFFFFFFU);
    const int32_t number = magnitude > kInfinityBits ? 0 : magnitude;
    largest_ = number > largest_ ? number : largest_;
    smallest_ = magnitude < smallest_ ? magnitude : smallest_;
  }
  NF_HOST_DEVICE void add(const float* x, int64_t count) {
    for (int64_t i = 0; i < count; ++i) add(x[i]);
  }
  // The maximum; 0 if there was no number.
  [[nodiscard]] NF_HOST_DEVICE float or_zero() const {
    return bits_float(static_cast<uint32_t>(largest_));
  }
  // The maximum; NaN if there was no number.
  [[nodiscard]] NF_HOST_DEVICE float or_nan() const {
    return smallest_ > kInfinityBits ? bits_float(0x7FFFFFFFU) : or_zero();
  }

 private:
  static constexpr int32_t kInfinityBits = 0x7F800000;
  // The members are signed because vector units compare signed integers.
  int32_t largest_ = 0;
  int32_t smallest_ = 0x7FFFFFFF;  // Minimum of all magnitudes: NaN only if every element is NaN.
};

}  // namespace narrowfloat
