// Conversions between fp32 and packed narrow floats, one instruction per function; portable code
// has the formulas of formats/ for E4M3. Packed results hold the first argument in the
// lower half.
#pragma once

#include "base/host_device.h"
#include "device/ptx/float_ops.cuh"
#include "device/ptx/packed.cuh"
#include "formats/e4m3_rounding.h"

namespace narrowfloat {

// e4m3_grid_code() of any number.
__device__ inline uint32_t saturated_e4m3_grid_code(float a) {
  return e4m3_grid_code(min_nan(fabsf(a), E4M3::kMaxFinite));
}

// cvt.rn.satfinite.e4m3x2.f32: nearest even, saturating; NaN gives 0x7F.
__device__ inline uint16_t to_e4m3x2(float low, float high) {
  if constexpr (kHasHopperInstructions) {
    uint16_t result;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(result) : "f"(high), "f"(low));
    return result;
  } else {
    const uint32_t codes[2] = {saturated_e4m3_grid_code(low), saturated_e4m3_grid_code(high)};
    const uint32_t signs = permute_bytes(float_bits(low), float_bits(high), 0x0073);
    return static_cast<uint16_t>(e4m3_codes(codes, signs));
  }
}

// One number.
__device__ inline uint8_t to_e4m3(float a) {
  if constexpr (kHasHopperInstructions) {
    return static_cast<uint8_t>(to_e4m3x2(a, 0.0F));
  } else {
    const uint32_t codes[1] = {saturated_e4m3_grid_code(a)};
    return static_cast<uint8_t>(e4m3_codes(codes, float_bits(a) >> 24));
  }
}

// Four numbers, the first in the lowest byte.
__device__ inline uint32_t to_e4m3x4(float a, float b, float c, float d) {
  if constexpr (kHasHopperInstructions) {
    return to_e4m3x2(a, b) | static_cast<uint32_t>(to_e4m3x2(c, d)) << 16;
  } else {
    const uint32_t codes[4] = {saturated_e4m3_grid_code(a), saturated_e4m3_grid_code(b),
                               saturated_e4m3_grid_code(c), saturated_e4m3_grid_code(d)};
    const uint32_t low = permute_bytes(float_bits(a), float_bits(b), 0x0073);
    const uint32_t high = permute_bytes(float_bits(c), float_bits(d), 0x0073);
    return e4m3_codes(codes, permute_bytes(low, high, 0x5410));
  }
}

// cvt.rn.satfinite.e2m1x2.f32 of eight numbers, the first in the lowest nibble: nearest even,
// saturating, signs of zeros kept; NaN gives 0x7. Only where kHasE2m1Conversion.
__device__ inline uint32_t to_e2m1x8(const float (&v)[8]) {
  uint32_t result;
  asm("{.reg .b8 a, b, c, d;"
      "cvt.rn.satfinite.e2m1x2.f32 a, %2, %1;"
      "cvt.rn.satfinite.e2m1x2.f32 b, %4, %3;"
      "cvt.rn.satfinite.e2m1x2.f32 c, %6, %5;"
      "cvt.rn.satfinite.e2m1x2.f32 d, %8, %7;"
      "mov.b32 %0, {a, b, c, d};}"
      : "=r"(result)
      : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "f"(v[4]), "f"(v[5]), "f"(v[6]), "f"(v[7]));
  return result;
}

// cvt.rn.bf16x2.f32: nearest even, overflow to infinity; NaN gives 0x7FFF.
__device__ inline uint32_t to_bf16x2(float low, float high) {
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

// cvt.rn.f16x2.f32: nearest even, overflow to infinity; NaN gives 0x7FFF.
__device__ inline uint32_t to_f16x2(float low, float high) {
  uint32_t result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

// cvt.rn.f16x2.e4m3x2: exact.
__device__ inline uint32_t e4m3x2_to_f16x2(uint16_t codes) {
  if constexpr (kHasHopperInstructions) {
    uint32_t result;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(codes));
    return result;
  } else {
    return to_f16x2(E4M3::decode(static_cast<uint8_t>(codes & 0xFFU)),
                    E4M3::decode(static_cast<uint8_t>(codes >> 8)));
  }
}

// cvt.rn.f16x2.e4m3x2 of the lower and of the upper half of four codes.
__device__ inline uint32_t e4m3x4_low_to_f16x2(uint32_t codes) {
  if constexpr (kHasHopperInstructions) {
    uint32_t result;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low;}"
        : "=r"(result)
        : "r"(codes));
    return result;
  } else {
    return e4m3x2_to_f16x2(static_cast<uint16_t>(codes & 0xFFFFU));
  }
}
__device__ inline uint32_t e4m3x4_high_to_f16x2(uint32_t codes) {
  if constexpr (kHasHopperInstructions) {
    uint32_t result;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high;}"
        : "=r"(result)
        : "r"(codes));
    return result;
  } else {
    return e4m3x2_to_f16x2(static_cast<uint16_t>(codes >> 16));
  }
}

// cvt.f32.f16 of the lower half: exact.
__device__ inline float f16_low_to_float(uint32_t pair) {
  float result;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low;}"
      : "=f"(result)
      : "r"(pair));
  return result;
}

// cvt.f32.f16 of the upper half.
__device__ inline float f16_high_to_float(uint32_t pair) {
  float result;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high;}"
      : "=f"(result)
      : "r"(pair));
  return result;
}

}  // namespace narrowfloat
