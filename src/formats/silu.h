// SiLU with the same bits on every device (spec 6.12): gate * sigmoid(gate) * up on top of the
// exponential of base/portable_math.h.
#pragma once

#include "base/portable_math.h"
#include "formats/math_policy.h"

namespace narrowfloat {

// silu(gate) * up before its rounding to 16 bits.
template <class Math>
NF_HOST_DEVICE float silu_mul(float gate, float up) {
  const float e = exp_portable(-gate);
  if constexpr (Math::kMode == MathMode::kExact) {
    return mul_rn(div_rn(gate, add_rn(1.0F, e)), up);
  } else {
    return Math::mul(Math::mul(gate, Math::rcp(Math::add(1.0F, e))), up);
  }
}

}  // namespace narrowfloat
