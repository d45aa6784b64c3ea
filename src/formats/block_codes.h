// The steps of encoding a block that depend on its elements alone: maximum, codes, packing. The
// quantizer and the encoder of activation rows share them, so that both give the same bytes.
#pragma once

#include <cstring>
#include <type_traits>

#include "base/float_ops.h"
#include "formats/block_format.h"

namespace narrowfloat {

// The maximum of a block under the format's NaN rule (spec 4.5).
template <BlockFormat Format>
NF_HOST_DEVICE float block_amax(const float* x, int64_t count) {
  AbsMax amax;
  amax.add(x, count);
  return Format::kAmaxOfNanIsNan ? amax.or_nan() : amax.or_zero();
}

// One code a byte.
template <BlockFormat Format, class Math>
NF_HOST_DEVICE void encode_values(const float* x, int64_t count, float multiplier, uint8_t* codes) {
  for (int64_t i = 0; i < count; ++i) codes[i] = Format::template encode<Math>(x[i], multiplier);
}

// A scale as it is stored: NaN is canonical (spec 4.6).
template <typename Stored>
NF_HOST_DEVICE Stored canonical_scale(Stored stored) {
  if constexpr (std::is_same_v<Stored, float>) return canonical_nan(stored);
  return stored;
}

// Packs `codes`, one a byte, as columns [col, col + count) of the row that starts at `row`. 4-bit
// codes are packed two a byte, the even column in the low nibble (spec 8.1).
template <typename Element>
void pack_codes(const uint8_t* codes, int64_t col, int64_t count, uint8_t* row) {
  if constexpr (Element::kBits == 4) {
    uint8_t* out = row + col / 2;
    for (int64_t i = 0; i < count / 2; ++i) {
      out[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
    }
  } else {
    if (count > 0) std::memcpy(row + col, codes, static_cast<size_t>(count));
  }
}

}  // namespace narrowfloat
