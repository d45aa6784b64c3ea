// sm90 quantizer by whole rows: NVFP4 per token, whose scale needs the maximum of its row; norms of
// every format, which need the sum of a row's squares; 4-over-6, which needs whole blocks in a
// thread.
//
//   row scale from max |y|, y = norm(row) or the row, then the format's blocks (spec 6.2, 6.12)
//
// One CTA quantizes a row. Run r of 16 elements belongs to thread r % threads, so a warp reads
// adjacent memory. The runs that its threads hold at a time are a chunk of the row, which stays in
// registers from its load to its codes: one pass over memory. Only rows of more than about 16384
// elements have several chunks, in kernels of their own (is_long): chunks after the first are
// loaded again in every pass, from the L2 cache. The CTAs after those of the rows zero the scale
// padding.
//
//   load | sum of squares | finish, maximum | scale, codes, stores      one barrier per statistic
//
// Bound by memory: NVFP4 from bf16 moves 2.56 bytes per element, a norm with residual 6.56.
#pragma once

#include "device/scale_row.cuh"
#include "ops/quantize/sm90/any_rows.cuh"
#include "ops/quantize/sm90/four_over_six.cuh"
#include "ops/quantize/sm90/norm_rows.cuh"
#include "ops/quantize/sm90/quantize_blocks.cuh"
#include "ops/quantize/sm90/row_runs.h"

namespace narrowfloat {

struct QuantizeRowsConfig {
  int runs;              // Runs per thread, in registers.
  int max_threads;       // Threads per row.
  int registers;         // Registers per thread, which limit the number of rows in flight.
  bool is_long = false;  // Rows may have several chunks.
  bool four_over_six = false;
};

// Rows of a launch, of the flattened [batch * rows] or of the row list.
struct QuantizeRowsGrid {
  int64_t first_row;
  uint32_t num_rows;
  int num_chunks;
  ScalePadding padding;
  ScalePadding extra_padding;
};

// The rows of a source as this kernel reads them. A source has
//   Elements                             a run of 16 elements in registers
//   kMayBeNorm, is_norm(params)          whether finish() needs 1 / rms of the row
//   load(params, place, col)             the operand of the statistics
//   add_input(params, place, cols, runs) norms: adds the input into the residual
//   finish(params, elements, col, rms)   the elements that are quantized
// NormRows of norm_rows.cuh is one; below are a source of row_sources.cuh, and any source.
template <class Source>
struct WholeRows {
  using Elements = typename Source::template Elements<kRowRun>;
  static constexpr bool kMayBeNorm = false;

  __device__ static bool is_norm(const QuantizeParams& /*params*/) { return false; }
  __device__ static Elements load(const QuantizeParams& params, const RowPlace& place,
                                  uint32_t col) {
    return Source::template load<kRowRun>(params, input_row(params, place), col, 1.0F);
  }
  __device__ static const Elements& finish(const QuantizeParams& /*params*/,
                                           const Elements& elements, uint32_t /*col*/,
                                           float /*factor*/) {
    return elements;
  }
};

template <BlockFormat Format, class Math>
struct AnyWholeRows {
  using Elements = FloatElements<kRowRun>;
  static constexpr bool kMayBeNorm = true;

  __device__ static bool is_norm(const QuantizeParams& params) {
    return params.row_input == RowInput::kNormBf16 || params.row_input == RowInput::kNormF16;
  }
  __device__ static Elements load(const QuantizeParams& params, const RowPlace& place,
                                  uint32_t col) {
    if (params.row_input == RowInput::kNormBf16) {
      return widened(NormRows<PackedBf16>::load(params, place, col));
    }
    if (params.row_input == RowInput::kNormF16) {
      return widened(NormRows<PackedF16>::load(params, place, col));
    }
    return AnyRows<Format, Math>::template load<kRowRun>(params, input_row(params, place), col,
                                                         1.0F);
  }
  template <int kRuns>
  __device__ static void add_input(const QuantizeParams& params, const RowPlace& place,
                                   const uint32_t (&cols)[kRuns], Elements (&runs)[kRuns]) {
    if (params.residual == nullptr) return;
    if (params.row_input == RowInput::kNormF16) return add<PackedF16>(params, place, cols, runs);
    add<PackedBf16>(params, place, cols, runs);
  }
  __device__ static Elements finish(const QuantizeParams& params, const Elements& h, uint32_t col,
                                    float factor) {
    if (params.row_input == RowInput::kNormBf16) {
      return widened(NormRows<PackedBf16>::finish(params, narrowed<PackedBf16>(h), col, factor));
    }
    if (params.row_input == RowInput::kNormF16) {
      return widened(NormRows<PackedF16>::finish(params, narrowed<PackedF16>(h), col, factor));
    }
    return h;
  }
  __device__ static void store(const QuantizeParams& params, const Elements& y, void* address) {
    if (params.row_input == RowInput::kNormF16) {
      return store_elements(narrowed<PackedF16>(y), address);
    }
    store_elements(narrowed<PackedBf16>(y), address);
  }

 private:
  template <class Half, int kRuns>
  __device__ static void add(const QuantizeParams& params, const RowPlace& place,
                             const uint32_t (&cols)[kRuns], Elements (&runs)[kRuns]) {
    PackedElements<Half, kRowRun> halves[kRuns];
#pragma unroll
    for (int i = 0; i < kRuns; ++i) halves[i] = narrowed<Half>(runs[i]);
    NormRows<Half>::add_input(params, place, cols, halves);
#pragma unroll
    for (int i = 0; i < kRuns; ++i) runs[i] = widened(halves[i]);
  }
};

template <bool kMayBeNorm>
struct RowStorage {
  float sums[kMayBeNorm ? kMaxNormSums : 1];
  uint32_t maxima[kWarpSize];
};

// A thread's runs of one chunk.
template <class Source, int kRuns>
struct Chunk {
  typename Source::Elements runs[kRuns];
};

template <int kRuns>
__device__ inline uint32_t run_col(int chunk, int run) {
  return (static_cast<uint32_t>(chunk * kRuns + run) * blockDim.x + threadIdx.x) * kRowRun;
}

// is_first: the input has not been added into the residual of this chunk yet.
template <class Source, int kRuns>
__device__ inline Chunk<Source, kRuns> load_chunk(const QuantizeParams& params,
                                                  const RowPlace& place, int index, bool is_first) {
  Chunk<Source, kRuns> chunk{};
  uint32_t cols[kRuns];
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    cols[i] = run_col<kRuns>(index, i);
    if (cols[i] < params.cols) chunk.runs[i] = Source::load(params, place, cols[i]);
  }
  if constexpr (Source::kMayBeNorm) {
    if (is_first && Source::is_norm(params)) {
      Source::add_input(params, place, cols, chunk.runs);
    }
  }
  return chunk;
}

// Computes the elements that are quantized from the loaded ones.
template <class Source, int kRuns>
__device__ inline void finish_chunk(const QuantizeParams& params, int index, float factor,
                                    Chunk<Source, kRuns>& chunk) {
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    const uint32_t col = run_col<kRuns>(index, i);
    if (col < params.cols) chunk.runs[i] = Source::finish(params, chunk.runs[i], col, factor);
  }
}

// Returns 1 / rms of the row whose first chunk is given; adds the input into the residual of all
// other chunks.
template <class Source, int kRuns>
__device__ inline float row_reciprocal_rms(const QuantizeParams& params, const RowPlace& place,
                                           const Chunk<Source, kRuns>& first, int num_chunks,
                                           float* shared_sums) {
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
  const auto store_sums = [&](const Chunk<Source, kRuns>& chunk, int index) {
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const float sum = warp_tree_sum(sum_of_squares(chunk.runs[i]));
      const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
      if (threadIdx.x % kWarpSize == 0) shared_sums[(index * kRuns + i) * warps + warp] = sum;
    }
  };
  store_sums(first, 0);
#pragma unroll 1
  for (int index = 1; index < num_chunks; ++index) {
    store_sums(load_chunk<Source, kRuns>(params, place, index, true), index);
  }
  __syncthreads();
  const float sum = tree_of_sums(shared_sums, num_chunks * kRuns * warps);
  return reciprocal_rms_of_sum(sum, params.cols, params.norm_eps);
}

// The largest number of a chunk as a bit pattern, 0 where there is none.
template <class Source, int kRuns>
__device__ inline uint32_t chunk_maximum(const Chunk<Source, kRuns>& chunk) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    const uint32_t number = chunk.runs[i].max_number();
    largest = max(largest, number > kInfinityBits ? 0U : number);
  }
  return largest;
}

// A thread's part of the maximum of the row whose first chunk is given, after finish().
template <class Source, int kRuns>
__device__ inline uint32_t row_maximum(const QuantizeParams& params, const RowPlace& place,
                                       const Chunk<Source, kRuns>& first, float factor,
                                       int num_chunks) {
  uint32_t largest = chunk_maximum(first);
#pragma unroll 1
  for (int index = 1; index < num_chunks; ++index) {
    auto chunk = load_chunk<Source, kRuns>(params, place, index, false);
    finish_chunk(params, index, factor, chunk);
    largest = max(largest, chunk_maximum(chunk));
  }
  return largest;
}

template <class Source, int kRuns>
__device__ inline void store_norm_output(const QuantizeParams& params, const RowPlace& place,
                                         int index, const Chunk<Source, kRuns>& chunk) {
  if (params.norm_output == nullptr) return;
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    const uint32_t col = run_col<kRuns>(index, i);
    if (col >= params.cols) continue;
    Source::store(
        params, chunk.runs[i],
        params.norm_output + (int64_t{place.flat_row} * params.cols + col) * sizeof(uint16_t));
  }
}

// The locations of the scales of row `row` of a batch.
template <typename Stored>
__device__ inline ScaleRow<Stored> scale_row_of(const ScaleTensors& tensors, uint32_t batch,
                                                int64_t row) {
  auto* tensor = reinterpret_cast<Stored*>(tensors.data + batch * tensors.tensor_bytes);
  return scale_row_of(tensor, tensors.layout, tensors.extents, row);
}

// Parameters that all blocks of a row share.
template <typename Stored>
struct RowScaling {
  ScalePair pair{};
  float row_amax = 0.0F;    // Set for per-token scales.
  float multiplier = 0.0F;  // Set for FP8 per tensor.
  ScaleRow<Stored> scales{};
  ScaleRow<Stored> extra_scales{};  // Set for norms.
};

// Computes the scaling of a row; stores the scales of the row or tensor as well.
template <BlockFormat Format, class Math>
__device__ inline auto scale_row(const QuantizeParams& params, const RowPlace& place,
                                 uint32_t row_amax) {
  using Stored = typename Format::Stored;
  RowScaling<Stored> scaling;
  if constexpr (Format::kId != FormatId::kFp8Tensor) {
    const bool has_groups = Format::kId == FormatId::kFp8Block1x128;
    const int64_t row = has_groups ? packed_row(params, place.row) : place.row;
    scaling.scales = scale_row_of<Stored>(params.scales, place.batch, row);
    if (params.extra_scales.data != nullptr) {
      scaling.extra_scales = scale_row_of<Stored>(params.extra_scales, place.batch, row);
    }
  }
  if constexpr (Format::kHasRowScale) {
    scaling.row_amax = bits_float(row_amax);
    const float base =
        params.device_base == nullptr ? params.base_decode_scale : *params.device_base;
    const auto scale = Format::template row_scale<Math>(scaling.row_amax, base);
    scaling.pair = scale.pair;
    if (threadIdx.x == 0) params.global_scale[place.flat_row] = canonical_nan(scale.stored);
  } else if constexpr (Format::kId == FormatId::kFp8Tensor) {
    const BlockScale<float> scale = tensor_scale<Math>(params, place.batch);
    scaling.multiplier = scale.multiplier;
    if (threadIdx.x == 0 && place.row == 0 && params.has_fp8_decode_scale) {
      store_scale(params.scales, place.batch, 0, 0, canonical_nan(scale.stored));
      store_scale(params.extra_scales, place.batch, 0, 0, canonical_nan(scale.stored));
    }
  } else {
    scaling.pair = row_pair<Format, Math>(params, place.batch, place.row);
    if (threadIdx.x == 0) store_decode_scale<Format, Math>(params, place.batch, place.row);
  }
  return scaling;
}

// Returns the codes of a run and stores the scale of its block, except for FP8 per tensor.
template <BlockFormat Format, class Math, class Source, class Tuning>
__device__ inline auto encode_run(const QuantizeParams& params,
                                  const RowScaling<typename Format::Stored>& scaling,
                                  const typename Source::Elements& elements,
                                  typename Format::Stored* stored) {
  if constexpr (Format::kId == FormatId::kFp8Tensor) {
    return general_codes<Format, Math>(elements, scaling.multiplier);
  } else if constexpr (Tuning::kConfig.four_over_six) {
    const FourOverSixRow row =
        four_over_six_row(params.four_over_six, scaling.pair, scaling.row_amax);
    const auto block = encode_four_over_six<Math, Format::kHasRowScale>(elements, row);
    *stored = block.stored;
    return block.codes;
  } else {
    const auto block = encode_block<Format, Math>(elements, scaling.pair, params.rules);
    *stored = block.stored;
    return block.codes;
  }
}

template <BlockFormat Format, class Math, class Source, class Tuning>
__device__ inline void quantize_run(const QuantizeParams& params, const RowPlace& place,
                                    const RowScaling<typename Format::Stored>& scaling,
                                    const typename Source::Elements& elements, uint32_t col) {
  using Stored = typename Format::Stored;
  Stored stored{0};
  const auto codes = encode_run<Format, Math, Source, Tuning>(params, scaling, elements, &stored);
  if (col >= params.value_cols) return;
  store_codes(codes, params.values + int64_t{place.flat_row} * params.value_row_bytes +
                         size_t{col} * Format::Element::kBits / 8);
  if constexpr (Format::kId != FormatId::kFp8Tensor) {
    constexpr auto kCols = static_cast<uint32_t>(Format::kBlockCols);
    if (col % kCols == 0) {
      const auto num_blocks = static_cast<uint32_t>(params.scales.extents.blocks);
      const Stored scale = col < params.cols ? stored : Stored{0};
      store_scale(scaling.scales, num_blocks, col / kCols, scale);
      if constexpr (Source::kMayBeNorm) {
        store_scale(scaling.extra_scales, num_blocks, col / kCols, scale);
      }
    }
  }
}

// Encodes a chunk; formats with row scales finished it before.
template <BlockFormat Format, class Math, class Source, class Tuning>
__device__ inline void quantize_chunk(const QuantizeParams& params, const RowPlace& place,
                                      const RowScaling<typename Format::Stored>& scaling, int index,
                                      float factor, Chunk<Source, Tuning::kConfig.runs>& chunk) {
  constexpr int kRuns = Tuning::kConfig.runs;
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    const uint32_t col = run_col<kRuns>(index, i);
    if constexpr (!Format::kHasRowScale) {
      // finish() runs run by run, so that its temporaries take registers for one run only.
      if (col < params.cols) chunk.runs[i] = Source::finish(params, chunk.runs[i], col, factor);
    }
    quantize_run<Format, Math, Source, Tuning>(params, place, scaling, chunk.runs[i], col);
  }
  if constexpr (Source::kMayBeNorm) store_norm_output(params, place, index, chunk);
}

// Stores the scales of an invalid row.
template <BlockFormat Format>
__device__ inline void store_zero_scales(const QuantizeParams& params, const RowPlace& place) {
  using Stored = typename Format::Stored;
  for (int64_t block = threadIdx.x; block < params.scales.extents.blocks; block += blockDim.x) {
    store_scale(params.scales, place.batch, place.row, static_cast<uint32_t>(block), Stored{0});
  }
  if (Format::kHasRowScale && threadIdx.x == 0) params.global_scale[place.flat_row] = 0.0F;
}

// The row of a CTA; -1 for an entry of the row list that is outside the tensor.
__device__ inline RowPlace place_of_row(const QuantizeParams& params,
                                        const QuantizeRowsGrid& grid) {
  if (params.row_list != nullptr) {
    const int32_t row = params.row_list[grid.first_row + blockIdx.x];
    return {0, row < params.rows ? row : -1, row};
  }
  const uint32_t index = static_cast<uint32_t>(grid.first_row) + blockIdx.x;
  uint32_t batch = 0;
  if (params.batch > 1) batch = params.rows_per_batch.quotient(index);
  const auto row = static_cast<int32_t>(index - batch * static_cast<uint32_t>(params.rows));
  return {batch, row, static_cast<int32_t>(index)};
}

// kHasExtra: there may be extra scales.
template <bool kHasExtra>
__device__ inline void clear_padding_of_launch(const QuantizeParams& params,
                                               const QuantizeRowsGrid& grid) {
  const int64_t index = static_cast<int64_t>(blockIdx.x - grid.num_rows) * blockDim.x + threadIdx.x;
  const auto clear = [&](const ScaleTensors& tensors, const ScalePadding& padding) {
    const int64_t per_tensor = padding.per_tensor();
    if (index >= per_tensor * params.batch) return;
    const auto batch = static_cast<uint32_t>(index / per_tensor);
    clear_padding(tensors, padding, batch, static_cast<uint32_t>(index - batch * per_tensor));
  };
  clear(params.scales, grid.padding);
  if constexpr (kHasExtra) clear(params.extra_scales, grid.extra_padding);
}

template <BlockFormat Format, class Math, class Source, class Tuning>
__global__ void __maxnreg__(Tuning::kConfig.registers)
    quantize_rows_kernel(const __grid_constant__ QuantizeParams params,
                         const __grid_constant__ QuantizeRowsGrid grid) {
  __shared__ RowStorage<Source::kMayBeNorm> shared_storage;
  constexpr int kRuns = Tuning::kConfig.runs;
  wait_for_previous_grids();
  if (blockIdx.x >= grid.num_rows) return clear_padding_of_launch<Source::kMayBeNorm>(params, grid);
  const RowPlace place = place_of_row(params, grid);
  if (place.row < 0) return;
  if (!Source::is_norm(params)) {
    if (place.row >= valid_rows(params, place.batch)) {
      store_zero_scales<Format>(params, place);
      // The scale of the tensor or batch is stored whether its rows are valid or not.
      if constexpr (!Format::kHasRowScale) {
        if (threadIdx.x == 0) store_decode_scale<Format, Math>(params, place.batch, place.row);
      }
      return;
    }
  }

  // A constant where possible: a loop costs ten registers even if it never runs twice.
  const int num_chunks = Tuning::kConfig.is_long ? grid.num_chunks : 1;
  auto chunk = load_chunk<Source, kRuns>(params, place, 0, true);
  trigger_dependent_launch();
  float factor = 1.0F;
  if (Source::is_norm(params)) {
    factor =
        row_reciprocal_rms<Source, kRuns>(params, place, chunk, num_chunks, shared_storage.sums);
  }
  uint32_t row_amax = 0;
  if constexpr (Format::kHasRowScale) {
    finish_chunk(params, 0, factor, chunk);
    row_amax = row_maximum<Source, kRuns>(params, place, chunk, factor, num_chunks);
    row_amax = block_max(row_amax, shared_storage.maxima);
  }
  const auto scaling = scale_row<Format, Math>(params, place, row_amax);
#pragma unroll 1
  for (int index = 0;;) {
    quantize_chunk<Format, Math, Source, Tuning>(params, place, scaling, index, factor, chunk);
    if (++index == num_chunks) return;
    chunk = load_chunk<Source, kRuns>(params, place, index, false);
    if constexpr (Format::kHasRowScale) finish_chunk(params, index, factor, chunk);
  }
}

}  // namespace narrowfloat
