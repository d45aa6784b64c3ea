// The block scales that a format has, and what elements become under each of them: the common part
// of searching a scale and of rounding with the scales that a weight has already.
#pragma once

#include <cstdint>

#include "base/assert.h"
#include "formats/minifloat.h"
#include "formats/mx.h"
#include "formats/nvfp4.h"
#include "layers/quantized_weight.h"

namespace narrowfloat {

inline constexpr int64_t kMaxBlockCols = 32;

template <class Math>
struct Nvfp4BlockScales {
  using Element = E2M1;
  static constexpr int64_t kCols = Nvfp4::kBlockCols;
  static constexpr int kFirst = 1;  // The smallest scale; zero is stored by convention only.
  static constexpr int kLast = E4M3::kMaxCode;

  float encode_scale;
  float stored_global;
  bool global_divides;

  [[nodiscard]] float multiplier(int stored) const {
    return Nvfp4::multiplier<Math>(static_cast<uint8_t>(stored),
                                   Nvfp4::scale_pair<Math>(encode_scale));
  }
  // The factor that readers of the file multiply codes by.
  [[nodiscard]] float decode_scale(int stored) const {
    const float scale = E4M3::decode(static_cast<uint8_t>(stored));
    return global_divides ? scale / stored_global : scale * stored_global;
  }
  // Whether half of this scale is one, too.
  static bool has_half(int stored) { return stored >= 2 << E4M3::kMantissaBits; }
  static uint8_t encode(float x, float multiplier) { return Nvfp4::encode<Math>(x, multiplier); }
};

template <class Math, class Format>
struct MxBlockScales {
  using Element = typename Format::Element;
  static constexpr int64_t kCols = Format::kBlockCols;
  static constexpr int kFirst = 0;
  static constexpr int kLast = UE8M0::kMaxCode;

  [[nodiscard]] float multiplier(int stored) const {
    return Format::template multiplier<Math>(static_cast<uint8_t>(stored));
  }
  [[nodiscard]] float decode_scale(int stored) const {
    return UE8M0::decode(static_cast<uint8_t>(stored));
  }
  static bool has_half(int stored) { return stored > 0; }
  static uint8_t encode(float x, float multiplier) {
    return Format::template encode<Math>(x, multiplier);
  }
};

// Whether `format` has such scales: NVFP4, MXFP4 and MXFP8.
inline bool has_block_scales(FormatId format) {
  return format == FormatId::kNvfp4 || format == FormatId::kMxfp4 || format == FormatId::kMxfp8;
}

template <class Math, class Body>
void with_block_scales_of(const QuantizedWeight& weight, float encode_scale, Body body) {
  switch (weight.spec().info.format) {
    case FormatId::kNvfp4:
      return body(Nvfp4BlockScales<Math>{encode_scale, weight.global_scale(),
                                         weight.spec().global_sense == GlobalScaleSense::kEncode});
    case FormatId::kMxfp4:
      return body(MxBlockScales<Math, Mxfp4>{});
    default:
      NF_ASSERT(weight.spec().info.format == FormatId::kMxfp8);
      return body(MxBlockScales<Math, Mxfp8>{});
  }
}

// Calls body(scales) with the block scales of the weight's format.
template <class Body>
void with_block_scales(const QuantizedWeight& weight, MathMode math, float encode_scale,
                       Body body) {
  if (math == MathMode::kExact) {
    with_block_scales_of<ExactMath>(weight, encode_scale, body);
  } else {
    with_block_scales_of<FastMath>(weight, encode_scale, body);
  }
}

}  // namespace narrowfloat
