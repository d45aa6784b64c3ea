// E4M3 tensors as input of FP4 formats (spec 6.10): elements are first converted to fp16 with the
// factor t = 6 / g, and everything else is computed from that copy h.
#pragma once

#include "formats/float16.h"
#include "formats/mx.h"
#include "formats/nvfp4.h"

namespace narrowfloat {

template <class Math>
struct Fp8Input {
  NF_HOST_DEVICE static float factor(float encode_scale) {
    if constexpr (Math::kMode == MathMode::kExact) {
      return min_number(div_rn(6.0F, encode_scale), kFloatMax);
    } else {
      return Math::mul(6.0F, Math::rcp(encode_scale));
    }
  }

  // h as fp32. `exact` saturates where fp16 would overflow.
  NF_HOST_DEVICE static float widen(uint8_t code, float factor) {
    constexpr float kF16Max = 65504.0F;
    float value = Math::mul(Math::template decode<E4M3>(code), factor);
    if constexpr (Math::kMode == MathMode::kExact) {
      if (value > kF16Max) value = kF16Max;
      if (value < -kF16Max) value = -kF16Max;
    }
    return f16_to_float(float_to_f16(value));
  }

  NF_HOST_DEVICE static BlockScale<uint8_t> nvfp4_scale(float amax, const ScalePair& pair) {
    if constexpr (Math::kMode == MathMode::kExact) {
      return Nvfp4::block_scale<Math>(amax, pair, BlockRules{});
    } else {
      const float scale = Math::mul(pair.encode, Math::mul(amax, kOneSixth));
      const uint8_t stored = Math::template encode<E4M3>(scale);
      return {stored, multiplier(scale, Math::template decode<E4M3>(stored), pair.encode)};
    }
  }

  NF_HOST_DEVICE static BlockScale<uint8_t> mxfp4_scale(float amax, const ScalePair& pair) {
    if constexpr (Math::kMode == MathMode::kExact) {
      const float scale = mul_rn(pair.encode, div_rn(amax, 6.0F));
      const uint8_t stored = UE8M0::encode_up(scale);
      if (scale == 0.0F) return {stored, 0.0F};
      // A NaN scale makes every code NaN; the clamp below would hide it.
      if (stored == UE8M0::kNanCode) return {stored, UE8M0::decode(stored)};
      return {stored, min_number(mul_rn(pair.encode, UE8M0::reciprocal(stored)), kFloatMax)};
    } else {
      const float scale = Math::mul(pair.encode, Math::mul(amax, kOneSixth));
      const uint8_t stored = UE8M0::encode_up(scale);
      return {stored, multiplier(scale, UE8M0::decode(stored), pair.encode)};
    }
  }

 private:
  NF_HOST_DEVICE static float multiplier(float scale, float stored, float encode_scale) {
    return scale != 0.0F ? Math::mul(encode_scale, Math::rcp(stored)) : 0.0F;
  }
};

}  // namespace narrowfloat
