// Eight E2M1 codes from eight fp32 numbers. The E2M1 conversion instruction makes them where the
// GPU has it; otherwise magnitudes are rounded in the fp32 pipe as in formats/e2m1_grid.h.
//
// All values carry that header's factor 2^-6. A rounded value then has the exponents of E4M3's
// denormals and first normals, and an E4M3 conversion, exact here, leaves the code in bits 2 to 4
// of a byte; portable code, which has no such instruction, moves it there. Only magnitudes are
// rounded: a negative number would be rounded to the grid of small ones, and zeros would lose their
// sign. The signs come from the input words.
//
// Valid for v < 7: larger values round outside E2M1's range. Callers test the block's largest v.
#pragma once

#include "device/elements.cuh"
#include "device/ptx/convert.cuh"
#include "device/ptx/packed.cuh"
#include "formats/e2m1_grid.h"

namespace narrowfloat {

// The signs of elements 2i and 2i+1 at bits 3 and 7 of byte i, for four words or eight floats.
template <class Elements>
__device__ inline uint32_t nibble_signs(const Elements& elements, int first) {
  uint32_t even;
  uint32_t odd;
  if constexpr (Elements::kIsPacked) {
    const uint32_t* words = elements.words + first / 2;
    // Bytes 1 and 3 of a word hold the signs.
    const uint32_t low = permute_bytes(words[0], words[1], 0x7351);
    const uint32_t high = permute_bytes(words[2], words[3], 0x7351);
    even = permute_bytes(low, high, 0x5410);
    odd = permute_bytes(low, high, 0x7632);
  } else {
    const uint32_t* words = elements.words + first;
    even = permute_bytes(permute_bytes(words[0], words[2], 0x0073),
                         permute_bytes(words[4], words[6], 0x0073), 0x5410);
    odd = permute_bytes(permute_bytes(words[1], words[3], 0x0073),
                        permute_bytes(words[5], words[7], 0x0073), 0x5410);
  }
  return (even >> 4 & 0x08080808U) | (odd & 0x80808080U);
}

// Packs four rounded values q (with the factor) in bytes, the code in bits 2 to 4 of each.
__device__ inline uint32_t grid_codes(float q0, float q1, float q2, float q3) {
  if constexpr (kHasHopperInstructions) {
    return to_e4m3x2(q0, q1) | static_cast<uint32_t>(to_e4m3x2(q2, q3)) << 16;
  } else {
    return (e2m1_grid_code(q0) >> 20) | (e2m1_grid_code(q1) >> 12) | (e2m1_grid_code(q2) >> 4) |
           (e2m1_grid_code(q3) << 4);
  }
}

// Codes of elements first to first + 7, element `first` in the lowest nibble. `multiplier` is that
// of the block times kE2m1Prescale.
template <class Math, class Elements>
__device__ inline uint32_t encode_e2m1_in_range(const Elements& elements, int first,
                                                float multiplier) {
  if constexpr (kHasE2m1Conversion) {
    // The multiplier without its factor. The product is exact.
    const float whole = __fmul_rn(multiplier, 1.0F / kE2m1Prescale);
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = Math::mul(elements[first + i], whole);
    return to_e2m1x8(v);
  } else {
    float q[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      q[i] = round_to_e2m1_grid(Math::mul(fabsf(elements[first + i]), multiplier));
    }
    const uint32_t even = grid_codes(q[0], q[2], q[4], q[6]);
    const uint32_t odd = grid_codes(q[1], q[3], q[5], q[7]);
    return (even >> 2) + (odd << 2) | nibble_signs(elements, first);
  }
}

}  // namespace narrowfloat
