// The scales of the FP8 outputs that only the all-reduce has (docs/allreduce.md). Maxima are taken
// over the elements that are numbers; 0 where there is none.
#pragma once

#include "base/float_ops.h"
#include "formats/minifloat.h"
#include "formats/ue8m0.h"

namespace narrowfloat {

// The decode scale of a token.
NF_HOST_DEVICE inline float fp8_token_scale(float amax) {
  return max_number(div_rn(amax, E4M3::kMaxFinite), div_rn(0x1p-9F, E4M3::kMaxFinite));
}

// The biased exponent of a group's scale: max(amax / 448, 1e-10), raised to a power of two; 254,
// the largest, for infinity.
NF_HOST_DEVICE inline uint8_t fp8_group_exponent(float amax) {
  return UE8M0::encode_up(max_number(div_rn(amax, E4M3::kMaxFinite), 1e-10F));
}

}  // namespace narrowfloat
