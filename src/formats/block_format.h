// The concept of a block format: a struct with the element and scale types, the block shape, and
// the only definition of its scale rule and its encoding. CPU and CUDA code, the command line,
// Python and the tests all derive from these structs and from the list of them in registry.h.
#pragma once

#include <concepts>
#include <cstdint>
#include <string_view>

#include "narrowfloat/format.h"
#include "narrowfloat/quantize.h"

namespace narrowfloat {

// Encode and decode factor of a whole tensor or row: g, which multiplies before quantization, and
// the factor of dequantization. They are not exact reciprocals of each other; each mode and format
// defines both.
struct ScalePair {
  float encode = 1.0F;
  float decode = 1.0F;
};

// The parameters of a block scale besides its maximum.
struct BlockRules {
  Ue8m0Rounding mx_rounding = Ue8m0Rounding::kUp;
  Fp8ScaleRule fp8_rule = Fp8ScaleRule::kReciprocal;
  float fp8_eps = 0.0F;
  float input_max = 0.0F;  // Largest finite number of the input type.
};

// A block's stored scale and the factor its elements are multiplied by before rounding.
template <typename Stored>
struct BlockScale {
  Stored stored;
  float multiplier;
};

// block_scale takes a policy of arithmetic (math_policy.h) and the block maximum `amax` (NaN if
// every element is NaN, for formats with kAmaxOfNanIsNan, else 0).
template <typename F>
concept BlockFormat = requires {
  { F::kId } -> std::convertible_to<FormatId>;
  { F::kName } -> std::convertible_to<std::string_view>;
  { F::kDescription } -> std::convertible_to<std::string_view>;
  { F::kBlockRows } -> std::convertible_to<int64_t>;
  { F::kBlockCols } -> std::convertible_to<int64_t>;
  { F::kScaleType } -> std::convertible_to<ScaleType>;
  { F::kDefaultLayout } -> std::convertible_to<ScaleLayoutId>;
  { F::kHasGlobalScale } -> std::convertible_to<bool>;
  { F::kHasRowScale } -> std::convertible_to<bool>;
  { F::kAmaxOfNanIsNan } -> std::convertible_to<bool>;
  typename F::Element;
  typename F::Stored;
};

// Properties that follow from the scale type.
template <BlockFormat F>
inline constexpr bool kHasByteScales = F::kScaleType != ScaleType::kF32;

}  // namespace narrowfloat
