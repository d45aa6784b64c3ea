// Global scales in both directions (spec 1.6). Encode scales multiply before quantization, decode
// scales multiply on dequantization.
#pragma once

#include "formats/math_policy.h"

namespace narrowfloat {

// Returns e4m3_max * 6 / amax, or 1 for a zero tensor and where the quotient underflows.
NF_HOST_DEVICE inline float encode_scale_of_amax(float amax, float e4m3_max) {
  const float g = min_number(div_rn(e4m3_max * 6.0F, amax), kFloatMax);
  return amax == 0.0F || g == 0.0F ? 1.0F : g;
}

}  // namespace narrowfloat
