// Blocks of the dense kernels in two steps. First every block on the way of ordinary data, a
// straight line of code from the load to the stores, which is what the latency of a short launch
// consists of. Then, behind those stores and out of line, the blocks for which that way is not
// right (NaN, infinities, scales out of the ordinary) once more by the format's plain formula.
#pragma once

#include "device/group_scale.cuh"
#include "ops/quantize/sm90/encode_unit.cuh"

namespace narrowfloat {

template <BlockFormat Format>
struct OrdinaryBlock {
  typename Format::Stored stored;
  float factor;   // For 4-bit codes with kE2m1Prescale.
  bool is_right;  // Else neither is what the format asks for.
};

template <BlockFormat Format, class Math>
__device__ inline OrdinaryBlock<Format> ordinary_8_bit(float amax, const BlockRules& rules) {
  if constexpr (Format::kId == FormatId::kFp8Block1x128 && Math::kMode == MathMode::kExact) {
    if (rules.fp8_rule == Fp8ScaleRule::kReciprocal) {
      const auto quick = quick_group_scale(amax < rules.fp8_eps ? rules.fp8_eps : amax);
      return {quick.scale.stored, quick.scale.multiplier, quick.is_right};
    }
  }
  const auto scale = Format::template block_scale<Math>(amax, ScalePair{}, rules);
  return {canonical_scale(scale.stored), scale.multiplier, true};
}

template <BlockFormat Format, class Math>
__device__ inline ScalePair pair_of(float encode) {
  if constexpr (Format::kHasGlobalScale) return Format::template scale_pair<Math>(encode);
  return ScalePair{};
}

// Of a block that a group of neighbouring lanes holds.
template <BlockFormat Format, class Math, class Elements>
__device__ inline OrdinaryBlock<Format> ordinary_block(const Elements& elements, float encode,
                                                       const BlockRules& rules) {
  constexpr int kLanes = static_cast<int>(Format::kBlockCols) / Elements::kSize;
  if constexpr (Format::Element::kBits == 8) {
    return ordinary_8_bit<Format, Math>(block_amax<Format, kLanes>(elements, kFullWarp), rules);
  } else {
    const float largest = bits_float(group_max<kLanes>(elements.max_or_nan()));
    // The compiler drops the decode factor where the scale does not need it.
    const auto scale = ordinary_scale<Format, Math>(largest, pair_of<Format, Math>(encode), rules);
    const bool is_right = scale.is_right && is_in_e2m1_range<Math>(largest, scale.prescaled);
    return {scale.stored, scale.prescaled, is_right};
  }
}

// Where a thread's results go.
template <typename Stored>
struct RunTarget {
  uint8_t* codes;
  Stored* scale;  // Null for lanes whose block another lane stores the scale of.
};

// A block by the plain formula. All lanes of its group come here.
template <BlockFormat Format, class Math, class Elements>
__device__ __noinline__ void store_plain_block(Elements elements, float encode,
                                               const BlockRules& rules,
                                               RunTarget<typename Format::Stored> target) {
  constexpr int kLanes = static_cast<int>(Format::kBlockCols) / Elements::kSize;
  const float amax = block_amax<Format, kLanes>(elements, lanes_of_group<kLanes>());
  const auto scale = Format::template block_scale<Math>(amax, pair_of<Format, Math>(encode), rules);
  store_codes(plain_codes<Format, Math>(elements, scale.multiplier), target.codes);
  if (target.scale != nullptr) *target.scale = canonical_scale(scale.stored);
}

// `block` is ordinary_block of the elements. If it is not right, store_plain_block has to follow.
template <BlockFormat Format, class Math, class Elements>
__device__ inline void store_ordinary_block(const Elements& elements,
                                            const OrdinaryBlock<Format>& block,
                                            const RunTarget<typename Format::Stored>& target) {
  if constexpr (Format::Element::kBits == 4) {
    store_codes(codes_in_range<Format, Math>(elements, block.factor), target.codes);
  } else {
    store_codes(plain_codes<Format, Math>(elements, block.factor), target.codes);
  }
  if (target.scale != nullptr) *target.scale = block.stored;
}

}  // namespace narrowfloat
