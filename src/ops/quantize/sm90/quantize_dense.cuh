// The quantizer of quantize_blocks.cuh for the usual case, with fewer instructions: one batch whose
// rows all count, whole blocks, one encode scale, no row groups.
//
// Then the codes of all runs are dense, so that a run's number alone says where its codes (and
// linear scales) go. About 12 instructions an element for NVFP4 from bf16 in place of 20, which is
// the difference between 106 and 99 us for 16384 x 7168 (docs/kernels/quantize.md).
#pragma once

#include "ops/quantize/sm90/quantize_blocks.cuh"

namespace narrowfloat {

// What every thread reads comes first: the constant cache fetches it in few lines.
struct QuantizeDenseParams {
  const uint8_t* input;      // [rows, cols], or 2 * cols for SiLU.
  int64_t input_row_stride;  // In bytes.
  FastDivisor runs_per_row;
  uint32_t num_runs;
  uint32_t element_blocks;  // Blocks of threads before those that zero padding.
  ScaleLayoutId layout;
  // swizzled: tiles beside each other; mn_major: scales from a block to the next.
  uint32_t layout_stride;
  uint32_t blocks;            // Of a row.
  const float* device_scale;  // Encode scale, or maximum; null: host_pair.
  uint8_t* values;
  uint8_t* scales;
  ScalePair host_pair;
  BlockRules rules;
  bool is_amax;
  float e4m3_max;
  float* global_scale;
  const uint8_t* vector;  // [cols]
  int64_t cols;
  ScaleImages images;
  ScalePadding padding;
};

// What dense_pair makes the scales from: loaded early, as all that follows waits for it.
template <class Params>
__device__ inline float load_device_scale(const Params& params) {
  return params.device_scale == nullptr ? 0.0F : *params.device_scale;
}

template <BlockFormat Format, class Math, class Params>
__device__ inline ScalePair dense_pair(const Params& params, float device_scale) {
  if (params.device_scale == nullptr) return params.host_pair;
  const float encode =
      params.is_amax ? encode_scale_of_amax(device_scale, params.e4m3_max) : device_scale;
  return Format::template scale_pair<Math>(encode);
}

template <typename Stored>
__device__ inline void store_dense_scale(const QuantizeDenseParams& params, uint32_t block_number,
                                         uint32_t row, Stored scale) {
  auto* image = reinterpret_cast<Stored*>(params.scales);
  if (params.layout == ScaleLayoutId::kLinear) {
    image[block_number] = scale;
    return;
  }
  const uint32_t block = block_number - row * params.blocks;
  if (params.layout == ScaleLayoutId::kMnMajor) {
    image[static_cast<int64_t>(block) * params.layout_stride + row] = scale;
    return;
  }
  Stored* place =
      image + (params.layout == ScaleLayoutId::kSwizzled128x4
                   ? Swizzled128x4Layout::offset_in_tiles(row, block, params.layout_stride)
                   : Swizzled8x4Layout::offset_in_tiles(row, block, params.layout_stride));
  *place = scale;
  if (block + 1 == params.blocks) {
    for (uint32_t pad = 1; (block + pad) % 4 != 0; ++pad) place[pad] = Stored{0};
  }
}

template <BlockFormat Format, class Params>
__device__ inline void store_dense_decode_scale(const Params& params) {
  if constexpr (Format::kHasGlobalScale) {
    if (params.is_amax) return;
    const float encode =
        params.device_scale == nullptr ? params.host_pair.encode : *params.device_scale;
    *params.global_scale = canonical_nan(div_rn(1.0F, encode));
  }
}

template <BlockFormat Format, class Math, class Source, class Tuning>
__global__ void __launch_bounds__(Tuning::kConfig.threads, Tuning::kConfig.blocks_per_sm)
    quantize_dense_kernel(const __grid_constant__ QuantizeDenseParams params) {
  constexpr int kRun = Tuning::kConfig.run;
  constexpr int kLanes = static_cast<int>(Format::kBlockCols) / kRun;
  constexpr int kCodeBytes = kRun * Format::Element::kBits / 8;
  const uint32_t run = blockIdx.x * Tuning::kConfig.threads + threadIdx.x;
  const uint32_t row = params.runs_per_row.quotient(run);
  const uint32_t run_in_row = run - row * params.runs_per_row.divisor();
  const bool is_inside = run < params.num_runs;
  const uint8_t* input = params.input + static_cast<int64_t>(row) * params.input_row_stride;
  uint8_t* values = params.values + static_cast<int64_t>(run) * kCodeBytes;
  wait_for_previous_grids();
  if (blockIdx.x >= params.element_blocks) {
    const uint32_t piece = run - params.element_blocks * Tuning::kConfig.threads;
    if (piece < params.padding.per_image()) clear_padding(params.images, params.padding, 0, piece);
    return;
  }
  const auto col = static_cast<int64_t>(run_in_row) * kRun;
  decltype(load_source_input<Source, kRun>(params, input, col)) loaded{};
  if (is_inside) loaded = load_source_input<Source, kRun>(params, input, col);
  float device_scale = 0.0F;
  if constexpr (Format::kHasGlobalScale) device_scale = load_device_scale(params);
  allow_next_grid();
  const auto elements = finish_source_input<Source>(loaded);
  ScalePair pair{};
  if constexpr (Format::kHasGlobalScale) pair = dense_pair<Format, Math>(params, device_scale);
  const auto block = encode_block<Format, Math, ScaleRule::kFormat>(elements, pair, params.rules);
  if (!is_inside) return;
  store_codes(block.codes, values);
  if (run % kLanes == 0) store_dense_scale(params, run / kLanes, row, block.stored);
  if (run == 0) store_dense_decode_scale<Format>(params);
}

// Where rows of a plain tensor follow each other without gaps and the scales are linear, the number
// of a run is all there is to addressing.
struct QuantizeFlatParams {
  const uint8_t* input;  // [rows, cols]
  uint8_t* values;
  uint8_t* scales;
  uint32_t num_runs;
  bool is_amax;
  const float* device_scale;  // As in QuantizeDenseParams.
  ScalePair host_pair;
  BlockRules rules;
  float* global_scale;
  float e4m3_max;
};

template <BlockFormat Format, class Math, class Half, class Tuning>
__global__ void __launch_bounds__(Tuning::kConfig.threads, Tuning::kConfig.blocks_per_sm)
    quantize_flat_kernel(const __grid_constant__ QuantizeFlatParams params) {
  using Elements = PackedElements<Half, Tuning::kConfig.run>;
  constexpr int kLanes = static_cast<int>(Format::kBlockCols) / Elements::kSize;
  constexpr int kCodeBytes = Elements::kSize * Format::Element::kBits / 8;
  const uint32_t run = blockIdx.x * Tuning::kConfig.threads + threadIdx.x;
  const bool is_inside = run < params.num_runs;
  wait_for_previous_grids();
  Elements elements{};
  if (is_inside) {
    elements = load_elements<Elements>(params.input + static_cast<int64_t>(run) * Elements::kBytes);
  }
  float device_scale = 0.0F;
  if constexpr (Format::kHasGlobalScale) device_scale = load_device_scale(params);
  allow_next_grid();
  ScalePair pair{};
  if constexpr (Format::kHasGlobalScale) pair = dense_pair<Format, Math>(params, device_scale);
  const auto block = encode_block<Format, Math, ScaleRule::kFormat>(elements, pair, params.rules);
  if (!is_inside) return;
  store_codes(block.codes, params.values + static_cast<int64_t>(run) * kCodeBytes);
  if (run % kLanes == 0) {
    reinterpret_cast<typename Format::Stored*>(params.scales)[run / kLanes] = block.stored;
  }
  if (run == 0) store_dense_decode_scale<Format>(params);
}

}  // namespace narrowfloat
