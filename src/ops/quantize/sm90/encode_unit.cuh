// From a thread's run of elements to its codes and its block's scale: the step that all CUDA
// quantizers share. Lanes whose runs make up a block lie side by side in a warp; all lanes of the
// warp take part.
#pragma once

#include "device/encode_e2m1.cuh"
#include "device/reduce.cuh"
#include "device/vector_io.cuh"
#include "formats/block_codes.h"
#include "formats/fp8_input.h"
#include "formats/registry.h"
#include "ops/quantize/sm90/row_sources.cuh"

namespace narrowfloat {

// The largest magnitudes of a block.
struct BlockMaximum {
  float largest;  // NaN if any element is NaN.
  float amax;     // As the format wants it (spec 4.5).
};

// Of the blocks that groups of kLanes lanes hold. NaN does not count in amax, but for formats where
// a block of nothing else is NaN.
template <BlockFormat Format, int kLanes, class Elements>
__device__ inline BlockMaximum block_maximum(const Elements& elements) {
  const uint32_t largest = group_max<kLanes>(elements.max_or_nan());
  BlockMaximum maximum{bits_float(largest), bits_float(largest)};
  // Uniform over the warp, and rare.
  if (__any_sync(kFullWarp, largest > kInfinityBits)) {
    const uint32_t number = elements.max_number();
    const bool has_number = number <= kInfinityBits;
    const uint32_t amax = group_max<kLanes>(has_number ? number : 0U);
    const bool is_all_nan = group_max<kLanes>(has_number ? 1U : 0U) == 0;
    maximum.amax = bits_float(Format::kAmaxOfNanIsNan && is_all_nan ? kNanBits : amax);
  }
  return maximum;
}

template <BlockFormat Format, class Math, ScaleRule kRule>
__device__ inline BlockScale<typename Format::Stored> scale_of_block(float amax,
                                                                     const ScalePair& pair,
                                                                     const BlockRules& rules) {
  if constexpr (kRule == ScaleRule::kE4m3Input) {
    if constexpr (Format::kId == FormatId::kNvfp4) return Fp8Input<Math>::nvfp4_scale(amax, pair);
    if constexpr (Format::kId == FormatId::kMxfp4) return Fp8Input<Math>::mxfp4_scale(amax, pair);
  }
  return Format::template block_scale<Math>(amax, pair, rules);
}

// The codes of a run, as stored: 4 or 8 bits an element.
template <class Element, int kCount>
struct Codes {
  static constexpr int kWords = kCount * Element::kBits / 32;
  uint32_t words[kWords];
};

// Eight codes of E2M1 by the format's plain formula, for blocks with NaN, infinities or a
// multiplier out of the ordinary.
template <BlockFormat Format, class Math, class Elements>
__device__ inline uint32_t encode_e2m1_any(const Elements& elements, int first, float multiplier) {
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t code = Format::template encode<Math>(elements[first + i], multiplier);
    codes |= code << (4 * i);
  }
  return codes;
}

// True where encode_e2m1_in_range gives the format's codes. largest: the block's largest magnitude,
// NaN if it has any; prescaled: the multiplier times kE2m1Prescale. The least multiplier keeps that
// product exact; zero belongs to blocks of zeros.
template <class Math>
__device__ inline bool is_in_e2m1_range(float largest, float prescaled) {
  constexpr uint32_t kLeast = 0x0D800000U;  // 2^-100
  const bool is_normal = float_bits(prescaled) - 1U >= kLeast - 1U;
  return Math::mul(largest, prescaled) < kE2m1FastLimit && is_normal;
}

template <BlockFormat Format, class Math, class Elements>
__device__ inline auto encode_elements(const Elements& elements, float largest, float multiplier) {
  Codes<typename Format::Element, Elements::kSize> codes;
  if constexpr (Format::Element::kBits == 4) {
    const float prescaled = Math::mul(multiplier, kE2m1Prescale);
    // One branch for all, so that the chains of all elements interleave.
    if (is_in_e2m1_range<Math>(largest, prescaled)) {
#pragma unroll
      for (int i = 0; i < codes.kWords; ++i) {
        codes.words[i] = encode_e2m1_in_range<Math>(elements, 8 * i, prescaled);
      }
    } else {
#pragma unroll
      for (int i = 0; i < codes.kWords; ++i) {
        codes.words[i] = encode_e2m1_any<Format, Math>(elements, 8 * i, multiplier);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < codes.kWords; ++i) {
      const auto scaled = [&](int j) {
        return Format::template scaled<Math>(elements[4 * i + j], multiplier);
      };
      codes.words[i] = to_e4m3x2(scaled(0), scaled(1)) |
                       static_cast<uint32_t>(to_e4m3x2(scaled(2), scaled(3))) << 16;
    }
  }
  return codes;
}

template <class CodesType>
__device__ inline void store_codes(const CodesType& codes, uint8_t* address) {
  if constexpr (CodesType::kWords == 1) {
    store(address, codes.words[0]);
  } else if constexpr (CodesType::kWords == 2) {
    store(address, uint2{codes.words[0], codes.words[1]});
  } else {
    static_assert(CodesType::kWords == 4);
    store(address, uint4{codes.words[0], codes.words[1], codes.words[2], codes.words[3]});
  }
}

}  // namespace narrowfloat
