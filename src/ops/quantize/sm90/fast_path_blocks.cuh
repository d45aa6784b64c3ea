// Encodes blocks of the dense kernels in two steps. First every block takes the fast path, a
// straight line of code from the load to the stores, which determines the latency of a short
// launch. After those stores and out of line, the blocks that the fast path does not cover (NaN,
// infinities, scales out of range) are encoded again by the format's general formula.
#pragma once

#include "device/encode_block.cuh"
#include "device/group_scale.cuh"

namespace narrowfloat {

template <BlockFormat Format>
struct FastPathBlock {
  typename Format::Stored stored;
  float factor;   // For 4-bit codes the factor includes kE2m1Prescale.
  bool is_right;  // If false, scale and factor are not the format's.
};

template <BlockFormat Format, class Math>
__device__ inline FastPathBlock<Format> fast_path_8_bit(float amax, const BlockRules& rules) {
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

// The fast path of a block that a group of adjacent lanes holds.
template <BlockFormat Format, class Math, class Elements>
__device__ inline FastPathBlock<Format> fast_path_block(const Elements& elements, float encode,
                                                        const BlockRules& rules) {
  constexpr int kLanes = static_cast<int>(Format::kBlockCols) / Elements::kSize;
  if constexpr (Format::Element::kBits == 8) {
    return fast_path_8_bit<Format, Math>(block_amax<Format, kLanes>(elements, kFullWarp), rules);
  } else {
    const float largest = bits_float(group_max<kLanes>(elements.max_or_nan()));
    // The compiler drops the decode factor where the scale does not need it.
    const auto scale = fast_path_scale<Format, Math>(largest, pair_of<Format, Math>(encode), rules);
    const bool is_right = scale.is_right && is_in_e2m1_range<Math>(largest, scale.prescaled);
    return {scale.stored, scale.prescaled, is_right};
  }
}

// The destinations of a thread's results.
template <typename Stored>
struct RunTarget {
  uint8_t* codes;
  Stored* scale;  // Null for lanes whose block's scale another lane stores.
};

// Encodes and stores a block by the general formula. All lanes of its group call it.
template <BlockFormat Format, class Math, class Elements>
__device__ __noinline__ void store_general_block(Elements elements, float encode,
                                                 const BlockRules& rules,
                                                 RunTarget<typename Format::Stored> target) {
  constexpr int kLanes = static_cast<int>(Format::kBlockCols) / Elements::kSize;
  const float amax = block_amax<Format, kLanes>(elements, lanes_of_group<kLanes>());
  const auto scale = Format::template block_scale<Math>(amax, pair_of<Format, Math>(encode), rules);
  store_codes(general_codes<Format, Math>(elements, scale.multiplier), target.codes);
  if (target.scale != nullptr) *target.scale = canonical_scale(scale.stored);
}

// Stores `block`, the fast_path_block() of the elements. If it is not right, store_general_block()
// must follow.
template <BlockFormat Format, class Math, class Elements>
__device__ inline void store_fast_path_block(const Elements& elements,
                                             const FastPathBlock<Format>& block,
                                             const RunTarget<typename Format::Stored>& target) {
  if constexpr (Format::Element::kBits == 4) {
    store_codes(codes_in_range<Format, Math>(elements, block.factor), target.codes);
  } else {
    store_codes(general_codes<Format, Math>(elements, block.factor), target.codes);
  }
  if (target.scale != nullptr) *target.scale = block.stored;
}

}  // namespace narrowfloat
