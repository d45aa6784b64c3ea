// Instructions on pairs of 16-bit floats in one register. Where one needs more than compute
// capability 8.0, portable code has another with the same results.
#pragma once

#include "base/host_device.h"

namespace narrowfloat {

// The halves without their signs.
inline constexpr uint32_t kMagnitudes16 = 0x7FFF7FFFU;

// max.bf16x2, max.f16x2: a number wins over NaN.
__device__ inline uint32_t max_bf16x2(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
__device__ inline uint32_t max_f16x2(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// max.xorsign.abs.bf16x2, .f16x2: the larger magnitude, with an arbitrary sign; a number wins over
// NaN.
__device__ inline uint32_t max_abs_bf16x2(uint32_t a, uint32_t b) {
  if constexpr (kHasHopperInstructions) {
    uint32_t result;
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
  } else {
    return max_bf16x2(a & kMagnitudes16, b & kMagnitudes16);
  }
}
__device__ inline uint32_t max_abs_f16x2(uint32_t a, uint32_t b) {
  if constexpr (kHasHopperInstructions) {
    uint32_t result;
    asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
  } else {
    return max_f16x2(a & kMagnitudes16, b & kMagnitudes16);
  }
}

// max.NaN.xorsign.abs.bf16x2, .f16x2: the larger magnitude; NaN wins.
__device__ inline uint32_t max_abs_nan_bf16x2(uint32_t a, uint32_t b) {
  uint32_t result;
  if constexpr (kHasHopperInstructions) {
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.bf16x2 %0, %1, %2;"
        : "=r"(result)
        : "r"(a & kMagnitudes16), "r"(b & kMagnitudes16));
  }
  return result;
}
__device__ inline uint32_t max_abs_nan_f16x2(uint32_t a, uint32_t b) {
  uint32_t result;
  if constexpr (kHasHopperInstructions) {
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.f16x2 %0, %1, %2;"
        : "=r"(result)
        : "r"(a & kMagnitudes16), "r"(b & kMagnitudes16));
  }
  return result;
}

// mul.rn.f16x2: denormals are kept.
__device__ inline uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// mul.rn.bf16x2: denormals are kept.
__device__ inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t result;
  if constexpr (kHasHopperInstructions) {
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  } else {
    // Adding -0 keeps the sign of a zero.
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(0x80008000U));
  }
  return result;
}

// add.rn.f16x2, add.rn.bf16x2, sub.rn.bf16x2: denormals are kept.
__device__ inline uint32_t add_f16x2(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
__device__ inline uint32_t add_bf16x2(uint32_t a, uint32_t b) {
  uint32_t result;
  if constexpr (kHasHopperInstructions) {
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  } else {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(0x3F803F80U), "r"(b));
  }
  return result;
}
__device__ inline uint32_t sub_bf16x2(uint32_t a, uint32_t b) {
  uint32_t result;
  if constexpr (kHasHopperInstructions) {
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  } else {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(b), "r"(0xBF80BF80U), "r"(a));
  }
  return result;
}

// Broadcasts the lower or the upper half to both halves, as moves: ptxas folds them into a
// multiplication, unlike prmt.
__device__ inline uint32_t low_halves(uint32_t pair) {
  uint32_t result;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low};}"
      : "=r"(result)
      : "r"(pair));
  return result;
}
__device__ inline uint32_t high_halves(uint32_t pair) {
  uint32_t result;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high};}"
      : "=r"(result)
      : "r"(pair));
  return result;
}

// prmt.b32: byte i of the result is byte selector[4i..4i+3] of the eight bytes of a (0 to 3) and b.
__device__ inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
}

}  // namespace narrowfloat
