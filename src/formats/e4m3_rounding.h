// Rounding to the numbers of E4M3, and their codes, for GPUs without the conversion: as in
// e2m1_grid.h, with numbers e / 8 apart in the binade of e, and 2^-9 apart below 2^-6.
//
//   t = max(v, 2^-6 * (1 + 2^-19))
//   r = fma(t, 2^20, -v)   rounds v to the grid, ties to the even code: the only rounding
//   q = fma(t, 2^20, -r)   is the rounded value, exact
#pragma once

#include <cmath>

#include "base/float_ops.h"
#include "formats/minifloat.h"

namespace narrowfloat {

// v: a magnitude of up to 448, or the canonical NaN. Bits 20 to 26 of the result are the code's
// magnitude, those of NaN all ones; those below are zero. Times 2^-120 a number of E4M3 has fp32's
// denormals and first normals where E4M3 has its own.
NF_HOST_DEVICE inline uint32_t e4m3_grid_code(float v) {
  const float t = fmaxf(v, 0x1.00002p-6F);  // Not NaN.
  const float r = fma_rn(t, 0x1p20F, -v);
  return float_bits(mul_rn(fma_rn(t, 0x1p20F, -r), 0x1p-120F));
}

// The codes of up to four numbers in bytes: `codes` from e4m3_grid_code(), `signs` in bits 7 of the
// bytes. NaN has no sign.
template <int kCount>
NF_HOST_DEVICE inline uint32_t e4m3_codes(const uint32_t (&codes)[kCount], uint32_t signs) {
  static_assert(kCount <= 4);
  uint32_t magnitudes = codes[0] >> 20 & 0x7FU;
  if constexpr (kCount > 1) magnitudes |= codes[1] >> 12 & 0x7F00U;
  if constexpr (kCount > 2) magnitudes |= codes[2] >> 4 & 0x7F0000U;
  if constexpr (kCount > 3) magnitudes |= codes[3] << 4 & 0x7F000000U;
  const uint32_t nan = magnitudes + 0x01010101U;
  return magnitudes | (signs & ~nan & 0x80808080U);
}

}  // namespace narrowfloat
