// Encodes a thread's run of elements and its block's scale: the step that all CUDA quantizers and
// the epilogue of the all-reduce share. Lanes whose runs form a block are adjacent in a warp; all
// lanes of the warp take part.
#pragma once

#include "device/device_math.cuh"
#include "device/encode_e2m1.cuh"
#include "device/reduce.cuh"
#include "device/vector_io.cuh"
#include "formats/block_codes.h"
#include "formats/fp8_input.h"
#include "formats/registry.h"

namespace narrowfloat {

// Block scales by the format's own rule, or by the rules for E4M3 input (spec 6.10).
enum class ScaleRule : int { kFormat = 0, kE4m3Input = 1 };

// The mask of the group of `kLanes` adjacent lanes that contains this thread.
template <int kLanes>
__device__ inline unsigned lanes_of_group() {
  const uint32_t first = threadIdx.x % kWarpSize / kLanes * kLanes;
  return (kFullWarp >> (kWarpSize - kLanes)) << first;
}

// The maximum of a block as its format defines it (spec 4.5): NaN does not count, but a block of
// NaN alone gives NaN for some formats. `lanes` is the mask of the lanes that take part, in whole
// groups.
template <BlockFormat Format, int kLanes, class Elements>
__device__ inline float block_amax(const Elements& elements, unsigned lanes) {
  float amax = bits_float(elements.max_number());
  // Compares floats, where a number wins over NaN.
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    amax = fmaxf(amax, __shfl_xor_sync(lanes, amax, distance));
  }
  return Format::kAmaxOfNanIsNan || !is_nan(amax) ? amax : 0.0F;
}

template <BlockFormat Format, class Math>
__device__ inline BlockScale<typename Format::Stored> scale_of_block(float amax,
                                                                     const ScalePair& pair,
                                                                     const BlockRules& rules,
                                                                     ScaleRule rule) {
  if (rule == ScaleRule::kE4m3Input) {
    if constexpr (Format::kId == FormatId::kNvfp4) return Fp8Input<Math>::nvfp4_scale(amax, pair);
    if constexpr (Format::kId == FormatId::kMxfp4) return Fp8Input<Math>::mxfp4_scale(amax, pair);
  }
  return Format::template block_scale<Math>(amax, pair, rules);
}

// The codes of a run as stored: 4 or 8 bits per element.
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

// Encodes eight elements as E2M1 by the format's formula, for blocks with NaN, infinities or a
// multiplier out of range. Not inlined, so that the code of the fast path stays short and in the
// instruction caches.
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

// True where encode_e2m1_in_range() gives the format's codes. largest: the block's largest
// magnitude, NaN if it has any; prescaled: RN(multiplier * kE2m1Prescale), never flushed. The
// product is exact from the least multiplier on; +0 belongs to blocks of zeros; a scale in device
// memory may make a multiplier negative.
template <class Math>
__device__ inline bool is_in_e2m1_range(float largest, float prescaled) {
  constexpr uint32_t kLeast = 0x0D800000U;  // 2^-100
  const uint32_t bits = float_bits(prescaled);
  const bool is_positive = bits - kLeast < kInfinityBits - kLeast;
  return Math::mul(largest, prescaled) < kE2m1FastLimit && (is_positive || bits == 0);
}

// The codes of 4-bit formats where is_in_e2m1_range() holds.
template <BlockFormat Format, class Math, class Elements>
__device__ inline auto codes_in_range(const Elements& elements, float prescaled) {
  Codes<typename Format::Element, Elements::kSize> codes;
#pragma unroll
  for (int i = 0; i < codes.kWords; ++i) {
    codes.words[i] = encode_e2m1_in_range<Math>(elements, 8 * i, prescaled);
  }
  return codes;
}

// The codes of any block.
template <BlockFormat Format, class Math, class Elements>
__device__ inline auto general_codes(const Elements& elements, float multiplier) {
  Codes<typename Format::Element, Elements::kSize> codes;
#pragma unroll
  for (int i = 0; i < codes.kWords; ++i) {
    if constexpr (Format::Element::kBits == 4) {
      codes.words[i] = encode_e2m1_any<Format, Math>(eight_of(elements, 8 * i), multiplier);
    } else {
      const auto scaled = [&](int k) {
        return Format::template scaled<Math>(elements[4 * i + k], multiplier);
      };
      codes.words[i] = to_e4m3x4(scaled(0), scaled(1), scaled(2), scaled(3));
    }
  }
  return codes;
}

// A block's scale on the fast path: without branches, so that the latency of short launches stays
// low. If is_right, the scale is the format's and no element of the block is NaN.
template <typename Stored>
struct FastPathScale {
  Stored stored;
  float prescaled;  // The multiplier times kE2m1Prescale.
  bool is_right;
};

// The scale of NVFP4 in exact mode (Nvfp4::block_scale); decode: RN(1 / encode). One Newton step
// makes an approximate reciprocal the correctly rounded one for every significand as long as
// nothing under- or overflows, which the ranges of the encode factor and of an E4M3 scale, 2^-9 to
// 448, ensure. A scale of zero gives NaN, which is not in range.
__device__ inline FastPathScale<uint8_t> fast_path_nvfp4_scale(float amax, float encode,
                                                               float decode) {
  const uint8_t stored =
      DeviceExactMath::encode<E4M3>(__fmul_rn(amax, __fmul_rn(encode, kOneSixth)));
  const float product = __fmul_rn(DeviceExactMath::decode<E4M3>(stored), decode);
  const float multiplier = newton_reciprocal(amax == 0.0F ? 1.0F : product);
  const bool is_moderate = encode >= 0x1p-100F && encode <= 0x1p100F;
  return {stored, __fmul_rn(multiplier, kE2m1Prescale), is_moderate};
}

template <BlockFormat Format, class Math>
__device__ inline FastPathScale<typename Format::Stored> fast_path_scale(
    float amax, const ScalePair& pair, const BlockRules& rules,
    ScaleRule rule = ScaleRule::kFormat) {
  if constexpr (Format::kScaleType == ScaleType::kE4M3 && Math::kMode == MathMode::kExact) {
    if (rule == ScaleRule::kFormat) {
      return fast_path_nvfp4_scale(amax, pair.encode, newton_reciprocal(pair.encode));
    }
  }
  const auto scale = scale_of_block<Format, Math>(amax, pair, rules, rule);
  return {scale.stored, mul_rn(scale.multiplier, kE2m1Prescale), true};
}

template <BlockFormat Format, class Elements>
struct EncodedBlock {
  Codes<typename Format::Element, Elements::kSize> codes;  // Codes of this lane's elements.
  typename Format::Stored stored;                          // Canonical.
};

// Encodes a block that a group of adjacent lanes holds.
template <BlockFormat Format, class Math, class Elements>
__device__ inline EncodedBlock<Format, Elements> encode_block(const Elements& elements,
                                                              const ScalePair& pair,
                                                              const BlockRules& rules,
                                                              ScaleRule rule = ScaleRule::kFormat) {
  constexpr int kLanes = static_cast<int>(Format::kBlockCols) / Elements::kSize;
  unsigned lanes = kFullWarp;
  if constexpr (Format::Element::kBits == 4) {
    const float largest = bits_float(group_max<kLanes>(elements.max_or_nan()));
    const auto fast_path = fast_path_scale<Format, Math>(largest, pair, rules, rule);
    // The condition is uniform in the group.
    if (fast_path.is_right && is_in_e2m1_range<Math>(largest, fast_path.prescaled)) {
      return EncodedBlock<Format, Elements>{
          codes_in_range<Format, Math>(elements, fast_path.prescaled), fast_path.stored};
    }
    lanes = lanes_of_group<kLanes>();
  }
  const float amax = block_amax<Format, kLanes>(elements, lanes);
  const auto scale = scale_of_block<Format, Math>(amax, pair, rules, rule);
  return EncodedBlock<Format, Elements>{general_codes<Format, Math>(elements, scale.multiplier),
                                        canonical_scale(scale.stored)};
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
