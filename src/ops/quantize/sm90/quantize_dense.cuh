// The quantizer of quantize_blocks.cuh for the usual case, with fewer instructions: one batch whose
// rows are all valid, whole blocks, one encode scale, no row groups.
//
// The codes of all runs are then dense, so that a run's number alone gives the address of its codes
// (and linear scales). NVFP4 from bf16 takes about 12 instructions per element instead of 20, which
// is the difference between 106 and 99 us for 16384 x 7168 (docs/kernels/quantize.md).
#pragma once

#include "ops/quantize/sm90/fast_path_blocks.cuh"
#include "ops/quantize/sm90/quantize_blocks.cuh"

namespace narrowfloat {

// The members that every thread reads come first, so that the constant cache fetches few lines.
struct QuantizeDenseParams {
  const uint8_t* input;      // [rows, cols], or 2 * cols for SiLU.
  int64_t input_row_stride;  // The stride counts bytes.
  FastDivisor runs_per_row;
  uint32_t num_runs;
  uint32_t element_ctas;  // CTAs before those that zero padding.
  ScaleLayoutId layout;
  // swizzled: tiles per row of tiles; mn_major: scales between consecutive blocks.
  uint32_t layout_stride;
  uint32_t blocks;            // Blocks per row.
  const float* device_scale;  // An encode scale or a maximum; null: host_encode.
  float host_encode;
  bool is_amax;
  uint8_t* values;
  uint8_t* scales;
  BlockRules rules;
  float e4m3_max;
  float* global_scale;
  const uint8_t* vector;  // [cols]
  int64_t cols;
  // The last row of tiles, if it has pad rows.
  uint8_t* last_tiles;
  uint32_t last_tile_rows;  // Rows that are not padding.
  uint32_t padding_pieces;
};

struct QuantizeDenseConfig {
  int threads;      // Threads per CTA.
  int run;          // Elements per thread.
  int ctas_per_sm;  // At least this many CTAs fit, which bounds the registers.
};

consteval bool is_valid(const QuantizeDenseConfig& config) {
  return config.threads % 32 == 0 && config.threads <= 1024 &&
         (config.run == 8 || config.run == 16);
}

// The meaning of device_scale: an encode scale, the maximum of the tensor, or either by
// params.is_amax.
enum class DeviceScale : int { kEncode = 0, kAmax = 1, kEither = 2 };

// The compile-time parameters of a dense kernel besides format, arithmetic and source: a tuning,
// the meaning of device_scale, and the layout where it is known. A branch at run time costs a short
// launch more than its instructions.
template <class TuningType, DeviceScale kScaleType, ScaleLayoutId... kLayouts>
struct DenseCase {
  static constexpr auto kConfig = TuningType::kConfig;
  static constexpr DeviceScale kScale = kScaleType;

  template <class Params>
  __device__ static ScaleLayoutId layout(const Params& params) {
    if constexpr (sizeof...(kLayouts) == 0) {
      return params.layout;
    } else {
      return (kLayouts, ...);
    }
  }
  template <class Params>
  __device__ static bool is_amax(const Params& params) {
    return kScale == DeviceScale::kAmax || (kScale == DeviceScale::kEither && params.is_amax);
  }
};

// The encode scale from the device, the host or the tensor's maximum. Loaded early, since all that
// follows waits for it.
template <class Params>
__device__ inline float load_device_scale(const Params& params) {
  return params.device_scale == nullptr ? params.host_encode : *params.device_scale;
}
template <class Case, class Params>
__device__ inline float dense_encode_scale(const Params& params, float loaded) {
  return Case::is_amax(params) ? encode_scale_of_amax(loaded, params.e4m3_max) : loaded;
}

// Stores the tensor's decode scale. The division runs only where it is needed: the first thread's
// time is the time of a small tensor.
template <class Params>
__device__ inline void store_dense_decode_scale(const Params& params, float encode) {
  float decode = newton_reciprocal(encode);
  if (!(encode >= 0x1p-100F && encode <= 0x1p100F)) decode = canonical_nan(div_rn(1.0F, encode));
  *params.global_scale = decode;
}

template <typename Stored>
__device__ inline Stored* dense_scale_place(const QuantizeDenseParams& params, ScaleLayoutId layout,
                                            uint32_t block_number, uint32_t row) {
  auto* base = reinterpret_cast<Stored*>(params.scales);
  if (layout == ScaleLayoutId::kLinear) return base + block_number;
  const uint32_t block = block_number - row * params.blocks;
  if (layout == ScaleLayoutId::kMnMajor) {
    return base + (static_cast<int64_t>(block) * params.layout_stride + row);
  }
  return base + (layout == ScaleLayoutId::kSwizzled128x4
                     ? Swizzled128x4Layout::offset_in_tiles(row, block, params.layout_stride)
                     : Swizzled8x4Layout::offset_in_tiles(row, block, params.layout_stride));
}

// Stores the zeros after a row's last block, up to a whole tile.
template <typename Stored>
__device__ inline void pad_row(const QuantizeDenseParams& params, ScaleLayoutId layout,
                               uint32_t block, Stored* place) {
  const bool is_swizzled =
      layout == ScaleLayoutId::kSwizzled128x4 || layout == ScaleLayoutId::kSwizzled8x4;
  if (block + 1 != params.blocks || !is_swizzled) return;
  for (uint32_t pad = 1; (block + pad) % 4 != 0; ++pad) place[pad] = Stored{0};
}

// Zeroes the pad rows of the last row of tiles, in pieces that are contiguous in memory: 16 bytes
// of swizzled_128x4, which are the blocks of rows r, r + 32, r + 64, r + 96; else 4 bytes of a row.
__device__ inline void clear_last_tiles(const QuantizeDenseParams& params, ScaleLayoutId layout,
                                        uint32_t piece) {
  if (piece >= params.padding_pieces) return;
  const uint32_t first = params.last_tile_rows;
  if (layout == ScaleLayoutId::kSwizzled128x4) {
    uint8_t* const place = params.last_tiles + int64_t{piece} * 16;
    const uint32_t row = piece % 32;
    if (row >= first) return store(place, uint4{0, 0, 0, 0});
    for (uint32_t i = 1; i < 4; ++i) {
      if (row + 32 * i >= first) store(place + 4 * i, 0U);
    }
    return;
  }
  const bool is_mn_major = layout == ScaleLayoutId::kMnMajor;
  const uint32_t tile_rows = is_mn_major ? 4 : 8;
  const int64_t tile_bytes = is_mn_major ? int64_t{params.layout_stride} * 4 : 32;
  const uint32_t row = piece % tile_rows;
  if (row >= first) store(params.last_tiles + piece / tile_rows * tile_bytes + row * 4, 0U);
}

template <BlockFormat Format, class Math, class Source, class Case>
__global__ void __launch_bounds__(Case::kConfig.threads, Case::kConfig.ctas_per_sm)
    quantize_dense_kernel(const __grid_constant__ QuantizeDenseParams params) {
  using Stored = typename Format::Stored;
  const ScaleLayoutId layout = Case::layout(params);
  constexpr int kRun = Case::kConfig.run;
  constexpr int kLanes = static_cast<int>(Format::kBlockCols) / kRun;
  constexpr int kCodeBytes = kRun * Format::Element::kBits / 8;
  const uint32_t run = blockIdx.x * Case::kConfig.threads + threadIdx.x;
  const uint32_t row = params.runs_per_row.quotient(run);
  const uint32_t run_in_row = run - row * params.runs_per_row.divisor();
  const bool is_inside = run < params.num_runs;
  const uint8_t* input = params.input + static_cast<int64_t>(row) * params.input_row_stride;
  wait_for_previous_grids();
  if (blockIdx.x >= params.element_ctas) {
    return clear_last_tiles(params, layout, run - params.element_ctas * Case::kConfig.threads);
  }
  const auto col = static_cast<int64_t>(run_in_row) * kRun;
  decltype(load_source_input<Source, kRun>(params, input, col)) loaded{};
  if (is_inside) loaded = load_source_input<Source, kRun>(params, input, col);
  float encode = 1.0F;
  if constexpr (Format::kHasGlobalScale) encode = load_device_scale(params);
  trigger_dependent_launch();
  const auto elements = finish_source_input<Source>(loaded);
  if constexpr (Format::kHasGlobalScale) encode = dense_encode_scale<Case>(params, encode);
  const auto block = fast_path_block<Format, Math>(elements, encode, params.rules);
  if (!is_inside) return;
  RunTarget<Stored> target{params.values + static_cast<int64_t>(run) * kCodeBytes, nullptr};
  if (run % kLanes == 0) {
    target.scale = dense_scale_place<Stored>(params, layout, run / kLanes, row);
    pad_row(params, layout, run_in_row / kLanes, target.scale);
  }
  store_fast_path_block<Format, Math>(elements, block, target);
  if constexpr (Format::kHasGlobalScale) {
    if (run == 0 && !Case::is_amax(params)) store_dense_decode_scale(params, encode);
  }
  if (__builtin_expect(!block.is_right, 0)) {
    store_general_block<Format, Math>(elements, encode, params.rules, target);
  }
}

// Parameters for rows of a plain tensor without gaps and linear scales: the number of a run gives
// all addresses.
struct QuantizeFlatParams {
  const uint8_t* input;  // [rows, cols]
  uint8_t* values;
  uint8_t* scales;
  uint32_t num_runs;
  const float* device_scale;  // The same as in QuantizeDenseParams.
  float host_encode;
  bool is_amax;
  BlockRules rules;
  float* global_scale;
  float e4m3_max;
};

template <BlockFormat Format, class Math, class Half, class Case>
__global__ void __launch_bounds__(Case::kConfig.threads, Case::kConfig.ctas_per_sm)
    quantize_flat_kernel(const __grid_constant__ QuantizeFlatParams params) {
  using Elements = PackedElements<Half, Case::kConfig.run>;
  using Stored = typename Format::Stored;
  constexpr int kLanes = static_cast<int>(Format::kBlockCols) / Elements::kSize;
  constexpr int kCodeBytes = Elements::kSize * Format::Element::kBits / 8;
  const uint32_t run = blockIdx.x * Case::kConfig.threads + threadIdx.x;
  const bool is_inside = run < params.num_runs;
  wait_for_previous_grids();
  Elements elements{};
  if (is_inside) {
    elements = load_elements<Elements>(params.input + static_cast<int64_t>(run) * Elements::kBytes);
  }
  float encode = 1.0F;
  if constexpr (Format::kHasGlobalScale) encode = load_device_scale(params);
  trigger_dependent_launch();
  if constexpr (Format::kHasGlobalScale) encode = dense_encode_scale<Case>(params, encode);
  const auto block = fast_path_block<Format, Math>(elements, encode, params.rules);
  if (!is_inside) return;
  RunTarget<Stored> target{params.values + static_cast<int64_t>(run) * kCodeBytes, nullptr};
  if (run % kLanes == 0) target.scale = reinterpret_cast<Stored*>(params.scales) + run / kLanes;
  store_fast_path_block<Format, Math>(elements, block, target);
  if constexpr (Format::kHasGlobalScale) {
    if (run == 0 && !Case::is_amax(params)) store_dense_decode_scale(params, encode);
  }
  if (__builtin_expect(!block.is_right, 0)) {
    store_general_block<Format, Math>(elements, encode, params.rules, target);
  }
}

}  // namespace narrowfloat
