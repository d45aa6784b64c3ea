// silu_mul of formats/silu.h for 16-bit gates, with the same bits and about 18 instructions an
// element in place of 60.
//
// Gates of magnitude up to 87 need none of the exponential's range tests: 2^n is a normal number
// and so is 1 + exp(-gate), and the quotient of `exact` mode comes from the approximate reciprocal
// y of d by one correction, q + y * (gate - q * d) with q = gate * y. Both shortcuts, and fusing
// the product and the sum that round gate / ln 2 to an integer, give the bits of silu_mul for all
// 2^16 gates of both types; a wider type would need a proof. All other gates, NaN and infinities
// included, take the general formula out of line: test the gates of a block once and branch.
//
//   const bool plain = !silu_gates_in_range<Half>(largest gate magnitudes of the block);
//   word = plain ? silu_mul_plain<Math, Half>(gates, ups) : silu_mul_in_range<Math, Half>(...);
#pragma once

#include "device/device_math.cuh"
#include "device/packed16.cuh"
#include "formats/silu.h"

namespace narrowfloat {

// silu(gate) * up for a 16-bit gate within +-87 and any up, before its rounding to 16 bits.
template <class Math>
__device__ inline float silu_mul_in_range(float gate, float up) {
  // The sum's lowest bits are 127 + n, the exponent field of 2^n, n = round(-gate / ln 2).
  constexpr float kRound = 0x1.8p23F + 127.0F;
  const float rounded = __fmaf_rn(gate, bits_float(0xBFB8AA3BU), kRound);
  const float n = __fadd_rn(rounded, -kRound);
  const float power = bits_float(float_bits(rounded) << 23);
  // r = gate + n * ln 2, the negative of exp_portable's; hence the alternating signs.
  float r = __fmaf_rn(n, 0x1.62e400p-1F, gate);
  r = __fmaf_rn(n, 0x1.7f7d1cp-20F, r);
  float p = __fmaf_rn(-1.0F / 5040.0F, r, 1.0F / 720.0F);
  p = __fmaf_rn(p, r, -1.0F / 120.0F);
  p = __fmaf_rn(p, r, 1.0F / 24.0F);
  p = __fmaf_rn(p, r, -1.0F / 6.0F);
  p = __fmaf_rn(p, r, 0.5F);
  p = __fmaf_rn(p, r, -1.0F);
  p = __fmaf_rn(p, r, 1.0F);
  // p * power is exact.
  const float d = __fmaf_rn(p, power, 1.0F);
  if constexpr (Math::kMode == MathMode::kExact && !kHasHopperInstructions) {
    return __fmul_rn(__fdiv_rn(gate, d), up);
  }
  const float y = rcp_approx(d);
  if constexpr (Math::kMode == MathMode::kFast) return Math::mul(Math::mul(gate, y), up);
  const float q = __fmul_rn(gate, y);
  // The remainder has this sign because the other one turns -0 into +0.
  const float remainder = __fmaf_rn(q, d, -gate);
  return __fmul_rn(__fmaf_rn(-remainder, y, q), up);
}

// Whether the halves of `magnitudes`, gates without their sign bits, are both at most 87.
template <class Half>
__device__ inline bool silu_gates_in_range(uint32_t magnitudes) {
  constexpr uint32_t kLimit = Half::kDType == DType::kBF16 ? 0x42AEU : 0x5570U;
  return (magnitudes & 0xFFFFU) <= kLimit && (magnitudes >> 16) <= kLimit;
}

// Computes two elements, rounded to 16 bits, from gates in range.
template <class Math, class Half>
__device__ inline uint32_t silu_mul_in_range(uint32_t gates, uint32_t ups) {
  return Half::pack(silu_mul_in_range<Math>(Half::low(gates), Half::low(ups)),
                    silu_mul_in_range<Math>(Half::high(gates), Half::high(ups)));
}

// Computes two elements for any gates.
template <class Math, class Half>
__device__ __noinline__ uint32_t silu_mul_plain(uint32_t gates, uint32_t ups) {
  return Half::pack(silu_mul<Math>(Half::low(gates), Half::low(ups)),
                    silu_mul<Math>(Half::high(gates), Half::high(ups)));
}

}  // namespace narrowfloat
