// Encodes rows of activations in a RowFormat on the GPU, with the bytes of tensor/row_encoder.h. A
// warp holds 128 neighbouring columns of one row, a lane four of them.
//
//   lane 4i .. 4i+3    one block of NVFP4      (16 columns)
//   lane 8i .. 8i+7    one block of MXFP8      (32 columns)
//   all lanes          one group of FP8 1x128  (the last group of a row may be short)
//
// All lanes of the warp take part: maxima come from shuffles. Lanes past the end of the row pass
// zeros and store nothing. On request rows are also stored dequantized, as bf16
// (moe_shared/dequantized_rows.h).
#pragma once

#include <type_traits>

#include "device/decode_codes.cuh"
#include "device/device_math.cuh"
#include "device/group_scale.cuh"
#include "device/reduce.cuh"
#include "device/vector_io.cuh"
#include "formats/block_codes.h"
#include "formats/registry.h"
#include "tensor/row_encoder.h"

namespace narrowfloat {

inline constexpr int kRowGroupCols = 128;
inline constexpr int kLaneCols = kRowGroupCols / kWarpSize;

struct FourColumns {
  float value[kLaneCols];
};

// The parameters of a row's codes besides its values.
struct RowFactors {
  float multiplier = 1.0F;  // kFp8Static and kFp8Token.
  ScalePair pair = {};      // NVFP4.
  float input_max = kFloatMax;
  float dequantized_factor = 1.0F;  // kMxfp8: factor of the scales of dequantized values.
};

// The factors of formats that need no row maximum.
template <RowFormat kFormat>
__device__ inline RowFactors row_factors(float multiplier, float input_max = kFloatMax) {
  RowFactors factors{.multiplier = multiplier, .input_max = input_max};
  if constexpr (kFormat == RowFormat::kNvfp4) {
    factors.pair = Nvfp4::scale_pair<DeviceExactMath>(multiplier);
  }
  return factors;
}

// Computes the factors of kNvfp4PerToken or kFp8Token from the maximum of the row; one thread
// stores the row scale.
template <RowFormat kFormat>
__device__ inline RowFactors token_row_factors(float row_amax, const RowTarget& target, bool stores,
                                               float input_max) {
  if constexpr (kFormat == RowFormat::kFp8Token) {
    const BlockScale<float> scale = group_scale(row_amax, input_max);
    if (stores) *target.row_scale = canonical_nan(scale.stored);
    return {.multiplier = scale.multiplier};
  } else {
    const auto scale = Nvfp4PerToken::row_scale<DeviceExactMath>(row_amax, kTokenBaseDecodeScale);
    if (stores) *target.row_scale = canonical_nan(scale.stored);
    return {.pair = scale.pair};
  }
}

// Packs the codes of four neighbouring values in a word.
__device__ inline uint32_t four_e4m3(const float* x, float multiplier) {
  return to_e4m3x4(__fmul_rn(x[0], multiplier), __fmul_rn(x[1], multiplier),
                   __fmul_rn(x[2], multiplier), __fmul_rn(x[3], multiplier));
}

namespace encode_row_detail {

template <RowFormat kFormat>
using BlockFormatOf = std::conditional_t<
    kFormat == RowFormat::kFp8Group, Fp8Block1x128,
    std::conditional_t<kFormat == RowFormat::kMxfp8, Mxfp8,
                       std::conditional_t<kFormat == RowFormat::kNvfp4, Nvfp4, Nvfp4PerToken>>>;

// Maximum over the lanes of a block. NaN does not count, except in formats where a block of NaN
// alone is NaN (spec 4.5).
template <BlockFormat Format>
__device__ inline float block_maximum(const FourColumns& x) {
  constexpr int kLanes = static_cast<int>(Format::kBlockCols) / kLaneCols;
  float amax = fabsf(x.value[0]);
#pragma unroll
  for (int i = 1; i < kLaneCols; ++i) amax = fmaxf(amax, fabsf(x.value[i]));
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    amax = fmaxf(amax, __shfl_xor_sync(kFullWarp, amax, distance));
  }
  return Format::kAmaxOfNanIsNan || !is_nan(amax) ? amax : 0.0F;
}

template <BlockFormat Format>
__device__ inline uint16_t four_e2m1(const FourColumns& x, float multiplier) {
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < kLaneCols; ++i) {
    codes |= uint32_t{Format::template encode<DeviceExactMath>(x.value[i], multiplier)} << (4 * i);
  }
  return static_cast<uint16_t>(codes);
}

// All lanes hold one group, whose maximum ignores NaN.
__device__ inline BlockScale<float> scale_of_warp(const FourColumns& x, float input_max) {
  float amax = 0.0F;
#pragma unroll
  for (const float value : x.value) amax = fmaxf(amax, fabsf(value));
  amax = bits_float(__reduce_max_sync(kFullWarp, float_bits(amax)));
  const QuickGroupScale quick = quick_group_scale(amax);
  return __builtin_expect(quick.is_right, 1) ? quick.scale : group_scale(amax, input_max);
}

template <BlockFormat Format>
__device__ inline auto scale_of_lanes(const FourColumns& x, const RowFactors& factors) {
  if constexpr (Format::kBlockCols == kRowGroupCols) {
    return scale_of_warp(x, factors.input_max);
  } else {
    return Format::template block_scale<DeviceExactMath>(block_maximum<Format>(x), factors.pair,
                                                         BlockRules{});
  }
}

// The factor of a code in the dequantized value. It is 1 for FP8 1x128, whose scale is applied
// later.
template <BlockFormat Format, typename Stored>
__device__ inline float dequantized_scale(Stored stored, const RowFactors& factors) {
  if constexpr (Format::kScaleType == ScaleType::kUE8M0) {
    return mul_rn(UE8M0::decode(stored), factors.dequantized_factor);
  } else if constexpr (Format::kScaleType == ScaleType::kE4M3) {
    return E4M3::decode(stored);
  } else {
    return 1.0F;
  }
}

template <BlockFormat Format>
__device__ inline uint2 decode_four(uint32_t codes, float scale) {
  if constexpr (Format::Element::kBits == 8) {
    return {decode_e4m3x2(codes, scale), decode_e4m3x2(codes >> 16, scale)};
  } else {
    return {decode_e2m1x2(codes, scale), decode_e2m1x2(codes >> 8, scale)};
  }
}

template <RowFormat kFormat>
__device__ inline void store_blocks(const FourColumns& x, uint32_t col, bool has_columns,
                                    const RowFactors& factors, const RowTarget& target,
                                    uint16_t* dequantized) {
  using Format = BlockFormatOf<kFormat>;
  constexpr int kLanes = static_cast<int>(Format::kBlockCols) / kLaneCols;
  const auto scale = scale_of_lanes<Format>(x, factors);
  if (!has_columns) return;
  uint32_t codes;
  if constexpr (Format::Element::kBits == 8) {
    codes = four_e4m3(x.value, scale.multiplier);
    store(target.values + col, codes);
  } else {
    codes = four_e2m1<Format>(x, scale.multiplier);
    store(target.values + col / 2, static_cast<uint16_t>(codes));
  }
  if (dequantized != nullptr) {
    store(dequantized + col,
          decode_four<Format>(codes, dequantized_scale<Format>(scale.stored, factors)));
  }
  if (threadIdx.x % kLanes != 0) return;
  auto* const scales = static_cast<typename Format::Stored*>(target.scales);
  scales[col / Format::kBlockCols * target.scale_stride] = canonical_scale(scale.stored);
}

}  // namespace encode_row_detail

// Encodes columns [col, col + 4) of the lane. CTAs are one-dimensional and have whole warps.
// dequantized: optional; column 0 of the row as bf16, for formats with block scales.
template <RowFormat kFormat>
__device__ inline void encode_row_group(const FourColumns& x, uint32_t col, bool has_columns,
                                        const RowFactors& factors, const RowTarget& target,
                                        uint16_t* dequantized = nullptr) {
  namespace detail = encode_row_detail;
  if constexpr (kFormat == RowFormat::kBf16) {
    if (!has_columns) return;
    store(target.values + 2 * uint64_t{col},
          uint2{to_bf16x2(x.value[0], x.value[1]), to_bf16x2(x.value[2], x.value[3])});
  } else if constexpr (kFormat == RowFormat::kFp32) {
    if (!has_columns) return;
    store(target.values + 4 * uint64_t{col},
          float4{canonical_nan(x.value[0]), canonical_nan(x.value[1]), canonical_nan(x.value[2]),
                 canonical_nan(x.value[3])});
  } else if constexpr (kFormat == RowFormat::kFp8Static || kFormat == RowFormat::kFp8Token) {
    if (has_columns) store(target.values + col, four_e4m3(x.value, factors.multiplier));
  } else {
    detail::store_blocks<kFormat>(x, col, has_columns, factors, target, dequantized);
  }
}

// Device pointers and strides of a CodedRows; the kernel knows the extents.
struct DeviceRows {
  uint8_t* values;
  uint64_t row_bytes;
  uint8_t* scales;             // Or null.
  uint64_t scale_row_bytes;    // Bytes from a row to the next.
  int64_t scale_block_stride;  // Scales from a block to the next.
  float* row_scale;            // Or null.

  [[nodiscard]] __device__ RowTarget target(uint64_t row) const {
    return {.values = values + row * row_bytes,
            .scales = scales == nullptr ? nullptr : scales + row * scale_row_bytes,
            .scale_stride = scale_block_stride,
            .row_scale = row_scale == nullptr ? nullptr : row_scale + row};
  }
};

inline DeviceRows device_rows(const CodedRows& rows, uint64_t row_bytes) {
  const TensorView& scales = rows.scales;
  const uint64_t scale_bytes =
      scales.is_absent() ? 0 : static_cast<uint64_t>(bits(scales.dtype)) / 8;
  return {.values = static_cast<uint8_t*>(rows.values.data),
          .row_bytes = row_bytes,
          .scales = static_cast<uint8_t*>(scales.data),
          .scale_row_bytes = static_cast<uint64_t>(scales.strides[0]) * scale_bytes,
          .scale_block_stride = scales.strides[1],
          .row_scale = static_cast<float*>(rows.row_scale.data)};
}

}  // namespace narrowfloat
