// Decodes columns of a packed strip of weights to Real [k][16], block scales and rounding of the
// mode included, and the strip's factors of a group.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "base/float_ops.h"
#include "formats/float16.h"
#include "formats/ue8m0.h"
#include "ops/grouped_gemm/decode_tables.h"
#include "ops/grouped_gemm/strip_weights.h"

namespace narrowfloat {

// The least r with 6 * scale <= 448 * 2^r; 0 for scale 0 (moe spec 11.3). scale: the largest
// magnitude of a group's E4M3 scales.
inline int rounding_exponent(float scale) {
  if (scale == 0.0F) return 0;
  return UE8M0::encode_up(div_rn(mul_rn(6.0F, scale), E4M3::kMaxFinite)) - UE8M0::kBias;
}

// Rounds to the nearest E4M3 value, ties to even, for |value| <= 448 or NaN: adding 2^20 times the
// value's power of two (2^-6 at least) makes the fp32 unit that of a 3-bit mantissa. No branches.
inline float rounded_to_e4m3(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t power = bits & 0x7F800000U;
  const uint32_t least = E4M3::kMinNormalBits;
  const float magic = bits_float((power < least ? least : power) + (20U << 23));
  const float rounded = add_rn(add_rn(bits_float(bits & 0x7FFFFFFFU), magic), -magic);
  return bits_float(float_bits(rounded) | (bits & 0x80000000U));
}

template <typename Real>
class StripDecoder {
 public:
  using Lanes = std::array<Real, kStripRows>;

  StripDecoder(const GemmShape& shape, const StripWeights& weights, int64_t expert, int64_t strip)
      : shape_(shape), weights_(weights), expert_(expert), strip_(strip) {}

  // Decodes columns [first, first + count); first is a multiple of 128.
  void decode(int64_t first, int64_t count, Real* out) const {
    if (shape_.mode.has_int8_rows) return decode_pair_steps(first, count, out);
    decode_codes(weights_.codes(expert_, strip_, first), count, out);
    if (shape_.mode.weight_scale != ScaleUse::kDecode) return;
    const int64_t block_cols = shape_.weight_scales.block_cols;
    for (int64_t k = 0; k < count; k += block_cols) {
      apply_scales((first + k) / block_cols, block_cols, out + k * kStripRows);
    }
    if (!shape_.mode.rounds_weights) return;
    for (int64_t k = 0; k < count; k += 128) {
      round_group(first + k, std::min<int64_t>(128, count - k), out + k * kStripRows);
    }
  }

  // The factors of a group's sums besides the row's factor: 1 where the mode has none.
  void factors(int64_t group, Lanes& out) const {
    if (shape_.mode.weight_scale != ScaleUse::kGroup) {
      out.fill(1);
    } else if (shape_.weight_scales.type == ScaleType::kF32) {
      out.fill(weights_.grid_scale(expert_, strip_, group));
    } else {
      block_scales(group, out);
    }
  }

 private:
  void decode_codes(const uint8_t* codes, int64_t count, Real* out) const {
    if (shape_.weights.dtype == DType::kBF16) {
      const auto* codes16 = reinterpret_cast<const uint16_t*>(codes);
      for (int64_t i = 0; i < count * kStripRows; ++i) out[i] = bf16_to_float(codes16[i]);
    } else if (shape_.weights.dtype == DType::kF8E4M3) {
      for (int64_t i = 0; i < count * kStripRows; ++i) out[i] = kE4M3Values<Real>[codes[i]];
    } else {
      for (int64_t i = 0; i < count * kStripRows / 2; ++i) {
        std::memcpy(out + 2 * i, &kE2M1Pairs<Real>[codes[i]], sizeof(CodePair<Real>));
      }
    }
  }

  // Codes of a strip of a pair; their scales are factors of sums.
  void decode_pair_steps(int64_t first, int64_t count, Real* out) const {
    for (int64_t k = 0; k < count; k += kPairStepCols) {
      const uint8_t* codes = weights_.codes(expert_, strip_, first + k);
      for (int64_t row = 0; row < kStripRows; ++row) {
        for (int64_t i = k; i < k + 4; ++i) {
          const CodePair<Real>& pair = kE2M1Pairs<Real>[*codes++];
          out[i * kStripRows + row] = pair.low;
          out[(i + 4) * kStripRows + row] = pair.high;
        }
      }
    }
  }

  void block_scales(int64_t block, Lanes& out) const {
    const uint8_t* codes = weights_.scales(expert_, strip_, block);
    const bool is_ue8m0 = shape_.weight_scales.type == ScaleType::kUE8M0;
    for (size_t row = 0; row < out.size(); ++row) {
      out[row] =
          is_ue8m0 ? static_cast<Real>(UE8M0::decode(codes[row])) : kE4M3Values<Real>[codes[row]];
    }
  }

  void apply_scales(int64_t block, int64_t cols, Real* values) const {
    Lanes scales;
    block_scales(block, scales);
    for (int64_t k = 0; k < cols; ++k) {
      for (size_t row = 0; row < scales.size(); ++row) *values++ *= scales[row];
    }
  }

  // Rounds the exact values of one group of 128 columns, or of the shorter last group, to multiples
  // of E4M3 values.
  void round_group(int64_t first, int64_t cols, Real* values) const {
    const int64_t block_cols = shape_.weight_scales.block_cols;
    std::array<float, kStripRows> largest{};
    for (int64_t block = first / block_cols; block < ceil_div(first + cols, block_cols); ++block) {
      Lanes scales;
      block_scales(block, scales);
      for (size_t row = 0; row < scales.size(); ++row) {
        const auto magnitude = static_cast<float>(std::abs(scales[row]));
        largest[row] = max_number(largest[row], magnitude);
      }
    }
    std::array<float, kStripRows> unit;
    std::array<float, kStripRows> inverse;
    for (size_t row = 0; row < unit.size(); ++row) {
      const int exponent = rounding_exponent(largest[row]);
      unit[row] = power_of_two(exponent);
      inverse[row] = power_of_two(-exponent);
    }
    for (int64_t k = 0; k < cols; ++k) {
      for (size_t row = 0; row < unit.size(); ++row, ++values) {
        const auto exact = static_cast<float>(*values);
        *values = mul_rn(unit[row], rounded_to_e4m3(mul_rn(exact, inverse[row])));
      }
    }
  }

  const GemmShape& shape_;
  const StripWeights& weights_;
  int64_t expert_;
  int64_t strip_;
};

}  // namespace narrowfloat
