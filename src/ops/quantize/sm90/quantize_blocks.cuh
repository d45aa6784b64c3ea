// The general sm90 quantizer of formats whose blocks lie inside a row: every format but NVFP4 per
// token and FP8 128x128, from every source but norms, with batches, row counts and row groups.
// quantize_dense.cuh has faster kernels for the usual calls.
//
//   codes = Element(x * multiplier(block maximum)), scale = the format's rule     (spec 6)
//
// A thread holds a run of 8 or 16 elements; V / run adjacent lanes hold a block of V elements. Runs
// of all rows are numbered consecutively (a row's runs rounded up to whole blocks), one thread each
// in a one-shot grid, so that any number of columns fills the warps. The CTAs after those zero the
// scale padding.
//
//   load run | maximum, over the lanes of the block by shuffles | scale | codes | store codes,
//   scale
#pragma once

#include "device/encode_block.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "ops/quantize/sm90/any_rows.cuh"
#include "ops/quantize/sm90/scale_stores.cuh"
#include "runtime/cuda/launch.h"

namespace narrowfloat {

inline constexpr int kBlocksThreads = 256;

// The input of the kernel: rows of any source in runs of 16 elements, or a bf16 tensor in runs of
// 8, where the loads and stores of 8-bit codes are whole cache lines.
template <BlockFormat Format, class Math>
struct BlocksOfAny {
  static constexpr int kRun = 16;
  using Elements = FloatElements<kRun>;

  __device__ static bool is_e4m3(const QuantizeParams& params) {
    return AnyRows<Format, Math>::is_e4m3(params);
  }
  __device__ static Elements load(const QuantizeParams& params, const uint8_t* row, int64_t col,
                                  float factor) {
    return AnyRows<Format, Math>::template load<kRun>(params, row, col, factor);
  }
};
struct BlocksOfBf16 {
  static constexpr int kRun = 8;
  using Elements = PackedElements<PackedBf16, kRun>;

  __device__ static bool is_e4m3(const QuantizeParams& /*params*/) { return false; }
  __device__ static Elements load(const QuantizeParams& params, const uint8_t* row, int64_t col,
                                  float /*factor*/) {
    return PlainRows<PackedBf16>::load<kRun>(params, row, col, 1.0F);
  }
};

// The rows and CTAs of one launch.
struct QuantizeBlocksGrid {
  int64_t first_row;  // Index into the flattened [batch * rows].
  uint32_t num_rows;
  FastDivisor runs_per_row;
  uint32_t element_ctas;  // CTAs before those that zero padding.
  ScalePadding padding;
};

template <BlockFormat Format, class Math>
__device__ inline void store_decode_scale(const QuantizeParams& params, uint32_t batch,
                                          int64_t row) {
  if constexpr (Format::kHasGlobalScale) {
    if (params.encode_source == EncodeScaleSource::kAmax) return;
    int64_t index = 0;
    bool is_mine = batch == 0 && row == 0;
    if (params.encode_axis == EncodeScaleAxis::kRow) {
      index = row;
      is_mine = batch == 0;
    } else if (params.encode_axis == EncodeScaleAxis::kBatch) {
      index = batch;
      is_mine = row == 0;
    }
    if (!is_mine) return;
    const float encode = encode_scale<Format>(params, batch, row);
    params.global_scale[index] = canonical_nan(div_rn(1.0F, encode));
  }
}

// The location of a thread's run.
struct RunPlace {
  uint32_t batch;
  int64_t row;       // Index within the batch.
  int64_t flat_row;  // batch * rows + row
  int64_t col;
  bool is_inside;  // The run lies inside the rows and the value columns.
  bool counts;     // The run is inside, in a valid row.
  bool is_input;   // The run also lies inside the input's columns.
};

template <int kRun>
__device__ inline RunPlace place_of_run(const QuantizeParams& params,
                                        const QuantizeBlocksGrid& grid) {
  const uint32_t run = blockIdx.x * kBlocksThreads + threadIdx.x;
  const uint32_t launch_row = grid.runs_per_row.quotient(run);
  const uint32_t run_in_row = run - launch_row * grid.runs_per_row.divisor();
  RunPlace place;
  // Threads beyond the last row look up the last row, whose data exists.
  place.flat_row = grid.first_row + min(launch_row, grid.num_rows - 1);
  place.col = static_cast<int64_t>(run_in_row) * kRun;
  place.is_inside = launch_row < grid.num_rows && place.col < params.value_cols;
  place.batch = 0;
  place.row = place.flat_row;
  if (params.batch > 1) {
    place.batch = params.rows_per_batch.quotient(static_cast<uint32_t>(place.flat_row));
    place.row = place.flat_row - place.batch * params.rows;
  }
  place.counts = place.is_inside && place.row < valid_rows(params, place.batch);
  place.is_input = place.counts && place.col < params.cols;
  return place;
}

__device__ inline const uint8_t* input_row(const QuantizeParams& params, const RunPlace& place) {
  return params.input + place.batch * params.input_batch_stride +
         place.row * params.input_row_stride;
}

// Returns the codes of a run; stores the scale of its block.
template <BlockFormat Format, class Math, class Elements>
__device__ inline auto encode_run(const QuantizeParams& params, const RunPlace& place,
                                  const Elements& elements, ScaleRule rule) {
  if constexpr (Format::kId == FormatId::kFp8Tensor) {
    const BlockScale<float> scale = tensor_scale<Math>(params, place.batch);
    if (place.is_inside && place.row == 0 && place.col == 0 && params.has_fp8_decode_scale) {
      store_scale(params.scales, place.batch, 0, 0, canonical_nan(scale.stored));
    }
    return general_codes<Format, Math>(elements, scale.multiplier);
  } else {
    constexpr int kLanes = static_cast<int>(Format::kBlockCols) / Elements::kSize;
    const ScalePair pair = row_pair<Format, Math>(params, place.batch, place.row);
    const auto block = encode_block<Format, Math>(elements, pair, params.rules, rule);
    if (place.is_inside && threadIdx.x % kLanes == 0) {
      // Pad columns and invalid rows have scale zero.
      using Stored = typename Format::Stored;
      store_scale(params.scales, place.batch, packed_row(params, place.row),
                  static_cast<uint32_t>(place.col / Format::kBlockCols),
                  place.is_input ? block.stored : Stored{0});
    }
    return block.codes;
  }
}

__device__ inline void clear_padding_of_launch(const QuantizeParams& params,
                                               const QuantizeBlocksGrid& grid) {
  // The pieces of all scale tensors together may exceed 32 bits.
  const auto index = int64_t{blockIdx.x - grid.element_ctas} * kBlocksThreads + threadIdx.x;
  const int64_t per_tensor = grid.padding.per_tensor();
  if (index >= per_tensor * params.batch) return;
  const auto batch = static_cast<uint32_t>(index / per_tensor);
  clear_padding(params.scales, grid.padding, batch,
                static_cast<uint32_t>(index - batch * per_tensor));
}

template <BlockFormat Format, class Math, class Rows>
__global__ void __launch_bounds__(kBlocksThreads)
    quantize_blocks_kernel(const __grid_constant__ QuantizeParams params,
                           const __grid_constant__ QuantizeBlocksGrid grid) {
  wait_for_previous_grids();
  if (blockIdx.x >= grid.element_ctas) {
    clear_padding_of_launch(params, grid);
    return;
  }
  const RunPlace place = place_of_run<Rows::kRun>(params, grid);
  const ScaleRule rule = Rows::is_e4m3(params) ? ScaleRule::kE4m3Input : ScaleRule::kFormat;
  typename Rows::Elements elements{};
  if (place.is_input) {
    float factor = 1.0F;
    if (rule == ScaleRule::kE4m3Input) {
      factor = Fp8Input<Math>::factor(encode_scale<Format>(params, place.batch, place.row));
    }
    elements = Rows::load(params, input_row(params, place), place.col, factor);
  }
  trigger_dependent_launch();
  const auto codes = encode_run<Format, Math>(params, place, elements, rule);
  if (place.counts) {
    store_codes(codes, params.values + place.flat_row * params.value_row_bytes +
                           place.col * Format::Element::kBits / 8);
  }
  if (place.is_inside && place.col == 0) {
    store_decode_scale<Format, Math>(params, place.batch, place.row);
  }
}

}  // namespace narrowfloat
