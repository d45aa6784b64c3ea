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

// The same where not all lanes of the warp take part, but all of each group.
template <BlockFormat Format, int kLanes, class Elements>
__device__ inline float maximum_beside_nan(const Elements& elements) {
  const uint32_t lane = threadIdx.x % kWarpSize;
  const unsigned group = ((kFullWarp >> (kWarpSize - kLanes)) << (lane / kLanes * kLanes));
  float amax = bits_float(elements.max_number());
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    amax = fmaxf(amax, __shfl_xor_sync(group, amax, distance));
  }
  if (!is_nan(amax)) return amax;
  return Format::kAmaxOfNanIsNan ? bits_float(kNanBits) : 0.0F;
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

// Elements first to first + 7 of a run.
template <class Half, int kCount>
__device__ inline PackedElements<Half, 8> eight_of(const PackedElements<Half, kCount>& run,
                                                   int first) {
  const uint32_t* words = run.words + first / 2;
  return {{words[0], words[1], words[2], words[3]}};
}
template <int kCount>
__device__ inline FloatElements<8> eight_of(const FloatElements<kCount>& run, int first) {
  const uint32_t* w = run.words + first;
  return {{w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]}};
}

// Eight codes of E2M1 by the format's plain formula, for blocks with NaN, infinities or a
// multiplier out of the ordinary. Out of line: the code of the ordinary way stays short and in the
// caches.
template <BlockFormat Format, class Math, class Eight>
__device__ __noinline__ uint32_t encode_e2m1_any(Eight elements, float multiplier) {
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t code = Format::template encode<Math>(elements[i], multiplier);
    codes |= code << (4 * i);
  }
  return codes;
}

// True where encode_e2m1_in_range gives the format's codes. largest: the block's largest magnitude,
// NaN if it has any; prescaled: RN(multiplier * kE2m1Prescale), never flushed. From the least
// multiplier on that product is exact; +0 belongs to blocks of zeros; what a device holds as scale
// may make a multiplier negative.
template <class Math>
__device__ inline bool is_in_e2m1_range(float largest, float prescaled) {
  constexpr uint32_t kLeast = 0x0D800000U;  // 2^-100
  const uint32_t bits = float_bits(prescaled);
  const bool is_positive = bits - kLeast < kInfinityBits - kLeast;
  return Math::mul(largest, prescaled) < kE2m1FastLimit && (is_positive || bits == 0);
}

// Codes of elements whose multiplier is known. largest: as for is_in_e2m1_range; counts for 4-bit
// formats only.
template <BlockFormat Format, class Math, class Elements>
__device__ inline auto encode_elements(const Elements& elements, float largest, float multiplier) {
  Codes<typename Format::Element, Elements::kSize> codes;
  if constexpr (Format::Element::kBits == 4) {
    const float prescaled = mul_rn(multiplier, kE2m1Prescale);
    // One branch for all, so that the chains of all elements interleave.
    if (is_in_e2m1_range<Math>(largest, prescaled)) {
#pragma unroll
      for (int i = 0; i < codes.kWords; ++i) {
        codes.words[i] = encode_e2m1_in_range<Math>(elements, 8 * i, prescaled);
      }
    } else {
#pragma unroll
      for (int i = 0; i < codes.kWords; ++i) {
        codes.words[i] = encode_e2m1_any<Format, Math>(eight_of(elements, 8 * i), multiplier);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < codes.kWords; ++i) {
      const auto scaled = [&](int k) {
        return Format::template scaled<Math>(elements[4 * i + k], multiplier);
      };
      codes.words[i] = to_e4m3x2(scaled(0), scaled(1)) |
                       static_cast<uint32_t>(to_e4m3x2(scaled(2), scaled(3))) << 16;
    }
  }
  return codes;
}

// A block's scale on the way of ordinary data: free of branches, so that the latency of short
// launches stays low. is_right: whether it is the format's; if so, no element of the block is NaN.
template <typename Stored>
struct OrdinaryScale {
  Stored stored;
  float prescaled;  // The multiplier times kE2m1Prescale.
  bool is_right;
};

// NVFP4 in exact mode (Nvfp4::block_scale), whose decode factor is RN(1 / encode). One Newton step
// makes an approximate reciprocal the correctly rounded one for every significand while nothing
// under- or overflows, which the ranges of the encode factor and of an E4M3 scale, 2^-9 to 448, see
// to. A scale of zero gives NaN, which is not in range.
__device__ inline OrdinaryScale<uint8_t> ordinary_nvfp4_scale(float amax, float encode) {
  const uint8_t stored =
      DeviceExactMath::encode<E4M3>(__fmul_rn(amax, __fmul_rn(encode, kOneSixth)));
  const float product = __fmul_rn(DeviceExactMath::decode<E4M3>(stored), newton_reciprocal(encode));
  const float multiplier = newton_reciprocal(amax == 0.0F ? 1.0F : product);
  const bool is_moderate = encode >= 0x1p-100F && encode <= 0x1p100F;
  return {stored, __fmul_rn(multiplier, kE2m1Prescale), is_moderate};
}

template <BlockFormat Format, class Math, ScaleRule kRule>
__device__ inline OrdinaryScale<typename Format::Stored> ordinary_scale(float amax,
                                                                        const ScalePair& pair,
                                                                        const BlockRules& rules) {
  constexpr bool kIsNvfp4 = Format::kScaleType == ScaleType::kE4M3;
  if constexpr (kIsNvfp4 && kRule == ScaleRule::kFormat && Math::kMode == MathMode::kExact) {
    return ordinary_nvfp4_scale(amax, pair.encode);
  } else {
    const auto scale = scale_of_block<Format, Math, kRule>(amax, pair, rules);
    return {scale.stored, mul_rn(scale.multiplier, kE2m1Prescale), true};
  }
}

template <BlockFormat Format, class Elements>
struct EncodedBlock {
  Codes<typename Format::Element, Elements::kSize> codes;  // Of this lane's elements.
  typename Format::Stored stored;                          // Canonical.
};

// The maximum of 8-bit formats, whose codes need to know nothing of NaN: comparisons of floats, in
// which a number wins.
template <BlockFormat Format, int kLanes, class Elements>
__device__ inline float number_maximum(const Elements& elements) {
  float amax = bits_float(elements.max_number());
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    amax = fmaxf(amax, __shfl_xor_sync(kFullWarp, amax, distance));
  }
  return Format::kAmaxOfNanIsNan || !is_nan(amax) ? amax : 0.0F;
}

// A block, which a group of neighbouring lanes holds.
template <BlockFormat Format, class Math, ScaleRule kRule, class Elements>
__device__ inline EncodedBlock<Format, Elements> encode_block(const Elements& elements,
                                                              const ScalePair& pair,
                                                              const BlockRules& rules) {
  constexpr int kLanes = static_cast<int>(Format::kBlockCols) / Elements::kSize;
  EncodedBlock<Format, Elements> block;
  if constexpr (Format::Element::kBits == 8) {
    const float amax = number_maximum<Format, kLanes>(elements);
    const auto scale = scale_of_block<Format, Math, kRule>(amax, pair, rules);
    block.stored = canonical_scale(scale.stored);
    block.codes = encode_elements<Format, Math>(elements, 0.0F, scale.multiplier);
  } else {
    const float largest = bits_float(group_max<kLanes>(elements.max_or_nan()));
    const auto ordinary = ordinary_scale<Format, Math, kRule>(largest, pair, rules);
    // The same for all lanes of the group.
    if (ordinary.is_right && is_in_e2m1_range<Math>(largest, ordinary.prescaled)) {
      block.stored = ordinary.stored;
#pragma unroll
      for (int i = 0; i < block.codes.kWords; ++i) {
        block.codes.words[i] = encode_e2m1_in_range<Math>(elements, 8 * i, ordinary.prescaled);
      }
    } else {
      const float amax = maximum_beside_nan<Format, kLanes>(elements);
      const auto scale = scale_of_block<Format, Math, kRule>(amax, pair, rules);
      block.stored = scale.stored;
#pragma unroll
      for (int i = 0; i < block.codes.kWords; ++i) {
        block.codes.words[i] =
            encode_e2m1_any<Format, Math>(eight_of(elements, 8 * i), scale.multiplier);
      }
    }
  }
  return block;
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
