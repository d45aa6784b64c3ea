// Device functions that quantize rows of activations: BF16, F16 or F32 rows to rows of a RowFormat
// with the bits of quantize(). A warp quantizes 128 columns of one row; a lane loads four
// neighbouring ones in one access of 8 or 16 bytes. Rows may be gathered, and may have a multiplier
// for each expert.
#pragma once

#include "base/fast_division.h"
#include "device/packed16.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "moe_shared/dequantized_rows.h"
#include "moe_shared/encode_row.cuh"

namespace narrowfloat {

inline constexpr uint32_t kNoRow = 0xFFFFFFFFU;

struct QuantizeActivationsParams {
  const uint8_t* input;         // [input_rows, cols]
  DeviceRows output;            // [rows, cols]
  DequantizedRows dequantized;  // Optional.
  DType input_dtype;
  float input_max;
  // Sources of the rows of the output, or, if they are listed, rows that are made from themselves;
  // or null. There is none where an entry is negative.
  const int32_t* map;
  bool is_list;
  uint32_t input_rows;
  uint32_t rows;  // The output's, or those of the list.
  uint32_t cols;
  uint32_t groups;      // Groups of 128 columns in a row.
  FastDivisor bundles;  // Bundles of groups in a row.
  float multiplier;
  // These are set if there is a multiplier per expert, else null.
  const float* multipliers;
  const int32_t* tile_to_expert;
  FastDivisor token_tile;
  int32_t experts;
};

// A row of the output and its source, or kNoRow. They never lie beyond the buffers, whatever the
// map holds.
struct RowPair {
  uint32_t source;
  uint32_t row;
};
__device__ inline RowPair pair_of(const QuantizeActivationsParams& params, uint32_t i) {
  if (i >= params.rows) return {kNoRow, i};
  // Negative entries are large ones.
  const uint32_t source = params.map == nullptr ? i : load_readonly<uint32_t>(params.map + i);
  return {source < params.input_rows ? source : kNoRow, params.is_list ? source : i};
}

__device__ inline float multiplier_of(const QuantizeActivationsParams& params, uint32_t row) {
  if (params.multipliers == nullptr) return params.multiplier;
  const auto tile = params.token_tile.quotient(row);
  const auto expert = load_readonly<int32_t>(params.tile_to_expert + tile);
  const bool exists = expert >= 0 && expert < params.experts;
  return exists ? load_readonly<float>(params.multipliers + expert) : 1.0F;
}

// Column 0 of a row that is also stored dequantized, or null.
__device__ inline uint16_t* dequantized_row(const QuantizeActivationsParams& params, uint32_t row) {
  return params.dequantized.has_values() ? params.dequantized.values + uint64_t{row} * params.cols
                                         : nullptr;
}

template <class Half>
__device__ inline FourColumns widened(uint2 words) {
  return {Half::low(words.x), Half::high(words.x), Half::low(words.y), Half::high(words.y)};
}
__device__ inline FourColumns widened(const QuantizeActivationsParams& params, uint2 words) {
  return params.input_dtype == DType::kBF16 ? widened<PackedBf16>(words)
                                            : widened<PackedF16>(words);
}

// Columns of a 16-bit type, as they are.
__device__ inline uint2 load_halves(const QuantizeActivationsParams& params, uint32_t row,
                                    uint32_t col) {
  return load_readonly<uint2>(params.input + 2 * (uint64_t{row} * params.cols + col));
}

__device__ inline FourColumns load_columns(const QuantizeActivationsParams& params, uint32_t row,
                                           uint32_t col) {
  if (params.input_dtype == DType::kF32) {
    const uint64_t element = uint64_t{row} * params.cols + col;
    return bit_cast<FourColumns>(load_readonly<float4>(params.input + 4 * element));
  }
  return widened(params, load_halves(params, row, col));
}

__device__ inline uint32_t lane_col(uint32_t group) {
  return group * kRowGroupCols + threadIdx.x % kWarpSize * kLaneCols;
}

// Called by a warp: quantizes bundle `item` of the rows' bundles of kGroups neighbouring groups.
// All groups of the bundle are loaded before the first is encoded.
template <RowFormat kFormat, int kGroups>
__device__ void quantize_bundle(const QuantizeActivationsParams& params, uint32_t item) {
  const uint32_t index = params.bundles.quotient(item);
  const auto [source, row] = pair_of(params, index);
  if (source == kNoRow) return;
  const uint32_t first = (item - index * params.bundles.divisor()) * kGroups;
  FourColumns x[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const uint32_t col = lane_col(first + i);
    x[i] = col < params.cols ? load_columns(params, source, col) : FourColumns{};
  }
  const RowFactors factors = row_factors<kFormat>(multiplier_of(params, row), params.input_max);
  trigger_dependent_launch();
  const RowTarget target = params.output.target(row);
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const uint32_t col = lane_col(first + i);
    encode_row_group<kFormat>(x[i], col, col < params.cols, factors, target,
                              dequantized_row(params, row));
  }
}

// The largest magnitude of four columns, or `amax`; NaN does not count.
__device__ inline float larger_maximum(float amax, const FourColumns& x) {
#pragma unroll
  for (const float value : x.value) amax = fmaxf(amax, fabsf(value));
  return amax;
}

// Maximum over the thread's columns.
__device__ inline float find_row_maximum(const QuantizeActivationsParams& params, uint32_t source) {
  float amax = 0.0F;
  for (uint32_t col = threadIdx.x * kLaneCols; col < params.cols; col += blockDim.x * kLaneCols) {
    amax = larger_maximum(amax, load_columns(params, source, col));
  }
  return amax;
}

// Called by a CTA: calls visit(columns, col, has_columns) for the lane's columns of each group of a
// row.
template <class Visit>
__device__ void visit_row(const QuantizeActivationsParams& params, uint32_t source, Visit&& visit) {
  const uint32_t warps = blockDim.x / kWarpSize;
  for (uint32_t group = threadIdx.x / kWarpSize; group < params.groups; group += warps) {
    const uint32_t col = lane_col(group);
    const bool has_columns = col < params.cols;
    visit(has_columns ? load_columns(params, source, col) : FourColumns{}, col, has_columns);
  }
}

template <RowFormat kFormat>
__device__ void encode_row_by_block(const QuantizeActivationsParams& params, const RowPair& pair,
                                    const RowFactors& factors, const RowTarget& target) {
  visit_row(params, pair.source, [&](const FourColumns& x, uint32_t col, bool has_columns) {
    encode_row_group<kFormat>(x, col, has_columns, factors, target,
                              dequantized_row(params, pair.row));
  });
}

// Called by a CTA, with a word of shared memory per warp: quantizes a row of a format with a row
// scale.
template <RowFormat kFormat>
__device__ inline void quantize_token_row(const QuantizeActivationsParams& params,
                                          const RowPair& pair, uint32_t* shared_scratch) {
  if (pair.source == kNoRow) return;
  const float amax = find_row_maximum(params, pair.source);
  const float row_amax = bits_float(block_max(float_bits(amax), shared_scratch));
  const RowTarget target = params.output.target(pair.row);
  const RowFactors factors =
      token_row_factors<kFormat>(row_amax, target, threadIdx.x == 0, params.input_max);
  trigger_dependent_launch();
  encode_row_by_block<kFormat>(params, pair, factors, target);
}

// Groups of a row that each warp of a CTA holds in registers.
inline constexpr uint32_t kHeldGroups = 8;

__device__ inline bool holds_row(const QuantizeActivationsParams& params) {
  return params.input_dtype != DType::kF32 &&
         params.groups <= kHeldGroups * (blockDim.x / kWarpSize);
}

// quantize_token_row() to kFp8Token for rows that holds_row() says the CTA holds: it reads them
// once, all columns at the same time.
__device__ inline void quantize_held_row(const QuantizeActivationsParams& params,
                                         const RowPair& pair, uint32_t* shared_scratch) {
  if (pair.source == kNoRow) return;
  const uint32_t step = blockDim.x * kLaneCols;
  uint2 held[kHeldGroups];
#pragma unroll
  for (uint32_t i = 0; i < kHeldGroups; ++i) {
    const uint32_t col = threadIdx.x * kLaneCols + i * step;
    held[i] = col < params.cols ? load_halves(params, pair.source, col) : uint2{};
  }
  float amax = 0.0F;
#pragma unroll
  for (const uint2 words : held) amax = larger_maximum(amax, widened(params, words));
  const float row_amax = bits_float(block_max(float_bits(amax), shared_scratch));
  const RowTarget target = params.output.target(pair.row);
  const RowFactors factors =
      token_row_factors<RowFormat::kFp8Token>(row_amax, target, threadIdx.x == 0, params.input_max);
#pragma unroll
  for (uint32_t i = 0; i < kHeldGroups; ++i) {
    const uint32_t col = threadIdx.x * kLaneCols + i * step;
    encode_row_group<RowFormat::kFp8Token>(widened(params, held[i]), col, col < params.cols,
                                           factors, target);
  }
}

// The power of two that is subtracted from the scales of a row of MXFP8, so that its values are
// exact in bf16.
__device__ inline int find_row_shift(const QuantizeActivationsParams& params, uint32_t source,
                                     uint32_t* shared_scratch) {
  int least = kMostExactScale;
  int most = 0;
  visit_row(params, source, [&](const FourColumns& x, uint32_t /*col*/, bool has_columns) {
    const int scale = encode_row_detail::scale_of_lanes<Mxfp8>(x, RowFactors{}).stored;
    if (!has_columns || scale == UE8M0::kNanCode) return;
    least = min(least, scale);
    most = max(most, scale);
  });
  const uint32_t below = block_max(static_cast<uint32_t>(kMostExactScale - least), shared_scratch);
  __syncthreads();
  const uint32_t largest = block_max(static_cast<uint32_t>(most), shared_scratch);
  return exact_scale_shift(kMostExactScale - static_cast<int>(below), static_cast<int>(largest));
}

// Called by a CTA, with a word of shared memory per warp: quantizes a row of MXFP8 and stores it
// dequantized as well.
__device__ inline void quantize_mxfp8_row(const QuantizeActivationsParams& params,
                                          const RowPair& pair, uint32_t* shared_scratch) {
  if (pair.source == kNoRow) return;
  const int shift = find_row_shift(params, pair.source, shared_scratch);
  if (threadIdx.x == 0) params.dequantized.factors[pair.row] = power_of_two(shift);
  trigger_dependent_launch();
  const RowFactors factors{.dequantized_factor = power_of_two(-shift)};
  encode_row_by_block<RowFormat::kMxfp8>(params, pair, factors, params.output.target(pair.row));
}

// Largest finite number of an input type (spec 6.7).
inline float largest_finite_of(DType dtype) {
  if (dtype == DType::kBF16) return bits_float(0x7F7F0000U);
  return dtype == DType::kF16 ? 65504.0F : kFloatMax;
}

}  // namespace narrowfloat
