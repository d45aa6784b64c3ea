// The arithmetic of the two math modes as types: block formulas are written once against a policy.
//
// A policy has mul, add, div, rcp (each one rounding), flush (denormals to zero where the mode does
// that), encode and decode of a MiniFloat, and kMode. ExactMath runs on the CPU and in CUDA code.
// FastMath is the CPU model of the GPU instructions `mul.ftz`, `add.ftz` and `rcp.approx.ftz`.
// device/device_math.cuh has policies with the same interface and results, built from the GPU's
// instructions.
#pragma once

#include "base/float_ops.h"
#include "base/host_device.h"
#include "formats/rcp_approx.h"
#include "narrowfloat/format.h"

namespace narrowfloat {

struct ExactMath {
  static constexpr MathMode kMode = MathMode::kExact;
  NF_HOST_DEVICE static float mul(float a, float b) { return mul_rn(a, b); }
  NF_HOST_DEVICE static float add(float a, float b) { return add_rn(a, b); }
  NF_HOST_DEVICE static float div(float a, float b) { return div_rn(a, b); }
  NF_HOST_DEVICE static float rcp(float a) { return div_rn(1.0F, a); }
  NF_HOST_DEVICE static float flush(float a) { return a; }
  template <class Float>
  NF_HOST_DEVICE static uint8_t encode(float a) {
    return Float::encode(a);
  }
  template <class Float>
  NF_HOST_DEVICE static float decode(uint8_t code) {
    return Float::decode(code);
  }
};

struct FastMath {
  static constexpr MathMode kMode = MathMode::kFast;

  // A denormal becomes a zero of its sign.
  static float flush(float a) {
    return is_denormal_or_zero(a) ? bits_float(float_bits(a) & 0x80000000U) : a;
  }

  // Tininess is detected after rounding to 24 bits with unbounded exponent (spec 4.2), so flushing
  // the IEEE product would be wrong just below 2^-126. The double product is exact.
  static float mul(float a, float b) {
    const double exact = static_cast<double>(flush(a)) * static_cast<double>(flush(b));
    const auto product = static_cast<float>(exact);
    const double magnitude = std::fabs(exact);
    // 2^-126 * (1 - 2^-25): the midpoint below which 24-bit rounding stays under 2^-126.
    constexpr double kTiny = 0x1p-126 - 0x1p-151;
    const uint32_t sign = float_bits(product) & 0x80000000U;
    const uint32_t least = sign | 0x00800000U;
    const uint32_t bits = magnitude < 0x1p-126 ? least : float_bits(product);
    return bits_float(magnitude < kTiny ? sign : bits);
  }

  static float add(float a, float b) { return flush(flush(a) + flush(b)); }
  // A correctly rounded quotient with flushed operands and result (spec 4.4).
  static float div(float a, float b) { return flush(flush(a) / flush(b)); }
  static float rcp(float a) { return rcp_approx_ftz(a); }
  template <class Float>
  static uint8_t encode(float a) {
    return Float::encode(a);
  }
  template <class Float>
  static float decode(uint8_t code) {
    return Float::decode(code);
  }
};

}  // namespace narrowfloat
