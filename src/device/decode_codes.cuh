// Dequantizes element codes of activations to bf16, exactly: times the scale of their block for
// E2M1 x E4M3 and E4M3 x UE8M0, without it for FP8 1x128 (moe_shared/dequantized_rows.h).
#pragma once

#include "base/float_ops.h"
#include "base/host_device.h"
#include "device/ptx/convert.cuh"
#include "formats/minifloat.h"

namespace narrowfloat {

// UE8M0 scales with which E4M3 codes are exact and normal numbers in bf16 (moe spec 11.2).
inline constexpr int kLeastExactScale = 10;
inline constexpr int kMostExactScale = 246;

// The power of two that is subtracted from the UE8M0 scales of a row, from the least and the
// largest scale that are numbers. A row with large scales is shifted down. A row with small scales
// is shifted up only if all of them are below 1, as sums of larger numbers could overflow.
__device__ inline int exact_scale_shift(int least, int most) {
  if (most > kMostExactScale) return most - kMostExactScale;
  return least < kLeastExactScale && most < 127 ? least - kLeastExactScale : 0;
}

// Decodes two codes, the first in the low byte.
__device__ inline uint32_t decode_e4m3x2(uint32_t codes, float scale) {
  const uint32_t pair = e4m3x4_low_to_f16x2(codes);
  return to_bf16x2(mul_rn(f16_low_to_float(pair), scale), mul_rn(f16_high_to_float(pair), scale));
}

// Decodes two codes, the first in the low nibble.
__device__ inline uint32_t decode_e2m1x2(uint32_t codes, float scale) {
  return to_bf16x2(mul_rn(E2M1::decode(static_cast<uint8_t>(codes & 0xFU)), scale),
                   mul_rn(E2M1::decode(static_cast<uint8_t>(codes >> 4 & 0xFU)), scale));
}

}  // namespace narrowfloat
