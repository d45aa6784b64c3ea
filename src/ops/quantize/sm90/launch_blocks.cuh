// Launching the kernels of quantize_dense.cuh and quantize_blocks.cuh: which of them, the tuning
// by size, the grid, and very large tensors in several launches.
#pragma once

#include <algorithm>

#include "ops/quantize/sm90/quantize_dense.cuh"
#include "ops/quantize/sm90/visit_sources.cuh"

namespace narrowfloat {

// 4-bit codes of dense rows: 5 KB a block of threads, which is still more than the 3.6 KB that
// memory moves while the GPU starts one.
struct DenseRuns {
  static constexpr QuantizeBlocksConfig kConfig{.threads = 128, .run = 16, .blocks_per_sm = 10};
  static_assert(is_valid(kConfig));
};
// Of dense rows with linear scales.
struct FlatRuns {
  static constexpr QuantizeBlocksConfig kConfig{.threads = 256, .run = 16, .blocks_per_sm = 6};
  static_assert(is_valid(kConfig));
};
// Few elements: short runs, so that more threads share the latency. Dense rows of 8-bit codes too:
// a warp's loads and stores are whole lines.
struct ShortRuns {
  static constexpr QuantizeBlocksConfig kConfig{.threads = 256, .run = 8, .blocks_per_sm = 8};
  static_assert(is_valid(kConfig));
};
// Many: a block of threads must move more than the 3.6 KB that memory moves while the GPU starts
// one.
struct LongRuns {
  static constexpr QuantizeBlocksConfig kConfig{.threads = 256, .run = 16, .blocks_per_sm = 5};
  static_assert(is_valid(kConfig));
};

// Long runs of sources with much arithmetic: small blocks of threads and at most 40 registers, so
// that loads of some overlap the arithmetic of others.
struct LongBusyRuns {
  static constexpr QuantizeBlocksConfig kConfig{.threads = 128, .run = 16, .blocks_per_sm = 12};
  static_assert(is_valid(kConfig));
};

// Elements from which long runs are as fast.
inline constexpr int64_t kLongRunElements = int64_t{1} << 24;

template <BlockFormat Format, class Math, class Source, class Tuning>
void launch_quantize_blocks(const QuantizeProblem& problem, const QuantizeParams& params,
                            Stream stream) {
  constexpr int kThreads = Tuning::kConfig.threads;
  constexpr int64_t kRun = Tuning::kConfig.run;
  constexpr int64_t kBlock = std::max(Format::kBlockCols, kRun);
  const int64_t runs_per_row = ceil_div(problem.value_cols, kBlock) * (kBlock / kRun);
  const int64_t rows = problem.batch * problem.rows;
  // Runs of a launch are numbered with 31 bits.
  const int64_t rows_at_once =
      std::max<int64_t>(1, ((int64_t{1} << 31) - 2 * kThreads) / runs_per_row);
  for (int64_t first = 0; first < rows; first += rows_at_once) {
    const int64_t num_rows = std::min(rows_at_once, rows - first);
    QuantizeBlocksGrid grid{.first_row = first,
                            .num_rows = static_cast<uint32_t>(num_rows),
                            .runs_per_row = FastDivisor(static_cast<uint32_t>(runs_per_row))};
    grid.element_blocks = static_cast<uint32_t>(ceil_div(num_rows * runs_per_row, kThreads));
    int64_t padding_blocks = 0;
    if (first == 0) {
      grid.padding = scale_padding(params.scales);
      padding_blocks = ceil_div(grid.padding.per_image() * problem.batch, kThreads);
    }
    const dim3 blocks(grid.element_blocks + static_cast<unsigned>(padding_blocks));
    launch(quantize_blocks_kernel<Format, Math, Source, Tuning>, {blocks, dim3(kThreads)}, stream,
           params, grid);
  }
}

// Whether the dense and flat kernels take the problem, with runs of `run` elements.
inline bool is_dense(const QuantizeProblem& problem, int64_t run) {
  constexpr int64_t kMaxRuns = (int64_t{1} << 31) - 2048;
  const FormatInfo& info = format_info(problem.format);
  return problem.batch == 1 && !problem.has_valid_rows && problem.groups == 0 &&
         problem.encode_axis == EncodeScaleAxis::kTensor && problem.value_cols == problem.cols &&
         problem.cols % info.block_cols == 0 && problem.rows * (problem.cols / run) < kMaxRuns;
}

// Pieces of the last tiles of rows, as clear_last_tiles takes them.
inline void set_padding(const ScaleImages& images, QuantizeDenseParams& dense) {
  if (images.layout == ScaleLayoutId::kLinear) return;
  const int64_t rows = images.extents.rows;
  const int64_t stride = dense.layout_stride;
  int64_t tile_rows = 128;  // And for every tile beside another, bytes and pieces:
  int64_t tile_bytes = 512;
  int64_t pieces = stride * 32;
  if (images.layout == ScaleLayoutId::kSwizzled8x4) {
    tile_rows = 8;
    tile_bytes = 32;
    pieces = stride * 8;
  }
  if (images.layout == ScaleLayoutId::kMnMajor) {
    tile_rows = 4;
    pieces = images.extents.blocks * 4;
  }
  if (rows % tile_rows == 0) return;
  const bool is_mn_major = images.layout == ScaleLayoutId::kMnMajor;
  const int64_t first = rows / tile_rows * (is_mn_major ? 16 : tile_bytes * stride);
  dense.last_tiles = images.data + first;
  dense.last_tile_rows = static_cast<uint32_t>(rows % tile_rows);
  dense.padding_pieces = static_cast<uint32_t>(pieces);
}

inline QuantizeDenseParams make_dense_params(const QuantizeProblem& problem,
                                             const QuantizeParams& params, int64_t run) {
  const int64_t runs_per_row = problem.cols / run;
  const ImageExtents& extents = params.scales.extents;
  QuantizeDenseParams dense{};
  dense.input = params.input;
  dense.input_row_stride = params.input_row_stride;
  dense.vector = params.vector;
  dense.cols = params.cols;
  dense.values = params.values;
  dense.scales = params.scales.data;
  dense.layout = params.scales.layout;
  dense.layout_stride = static_cast<uint32_t>(dense.layout == ScaleLayoutId::kMnMajor
                                                  ? MnMajorLayout::padded(extents).rows
                                                  : ceil_div(extents.blocks, 4));
  dense.blocks = static_cast<uint32_t>(extents.blocks);
  dense.num_runs = static_cast<uint32_t>(problem.rows * runs_per_row);
  dense.runs_per_row = FastDivisor(static_cast<uint32_t>(runs_per_row));
  if (params.encode_source == EncodeScaleSource::kTensor) dense.device_scale = params.encode_scales;
  if (params.encode_source == EncodeScaleSource::kAmax) dense.device_scale = params.global_scale;
  dense.e4m3_max = params.e4m3_max;
  dense.host_encode = params.host_pair.encode;
  dense.global_scale = params.global_scale;
  dense.rules = params.rules;
  set_padding(params.scales, dense);
  return dense;
}

// Calls visitor.template operator()<kIsAmax>().
template <BlockFormat Format, typename Visitor>
void visit_amax(const QuantizeProblem& problem, Visitor&& visitor) {
  if constexpr (Format::kHasGlobalScale) {
    if (problem.encode_source == EncodeScaleSource::kAmax)
      return visitor.template operator()<true>();
  }
  visitor.template operator()<false>();
}

template <BlockFormat Format, class Math, class Half, class Case>
void launch_quantize_flat(const QuantizeDenseParams& dense, Stream stream) {
  constexpr int kThreads = Case::kConfig.threads;
  const QuantizeFlatParams flat{.input = dense.input,
                                .values = dense.values,
                                .scales = dense.scales,
                                .num_runs = dense.num_runs,
                                .device_scale = dense.device_scale,
                                .host_encode = dense.host_encode,
                                .rules = dense.rules,
                                .global_scale = dense.global_scale,
                                .e4m3_max = dense.e4m3_max};
  const dim3 blocks(static_cast<unsigned>(ceil_div(flat.num_runs, kThreads)));
  launch(quantize_flat_kernel<Format, Math, Half, Case>, {blocks, dim3(kThreads)}, stream, flat);
}

template <BlockFormat Format, class Math, class Source, class Case>
void launch_dense_case(const QuantizeProblem& problem, const QuantizeParams& params,
                       Stream stream) {
  constexpr int kThreads = Case::kConfig.threads;
  QuantizeDenseParams dense = make_dense_params(problem, params, Case::kConfig.run);
  dense.element_blocks = static_cast<uint32_t>(ceil_div(dense.num_runs, kThreads));
  const auto padding = static_cast<uint32_t>(ceil_div(dense.padding_pieces, kThreads));
  launch(quantize_dense_kernel<Format, Math, Source, Case>,
         {dim3(dense.element_blocks + padding), dim3(kThreads)}, stream, dense);
}

// The layouts of matrix multiplications have kernels of their own.
template <BlockFormat Format, class Math, class Source, class Tuning>
void launch_quantize_dense(const QuantizeProblem& problem, const QuantizeParams& params,
                           Stream stream) {
  constexpr ScaleLayoutId kUsual =
      kHasByteScales<Format> ? ScaleLayoutId::kSwizzled128x4 : ScaleLayoutId::kMnMajor;
  visit_amax<Format>(problem, [&]<bool kIsAmax>() {
    if (params.scales.layout == kUsual) {
      using Case = DenseCase<Tuning, kIsAmax, kUsual>;
      return launch_dense_case<Format, Math, Source, Case>(problem, params, stream);
    }
    launch_dense_case<Format, Math, Source, DenseCase<Tuning, kIsAmax>>(problem, params, stream);
  });
}

// Plain 16-bit tensors: tunings of rows, and where flat addressing will do.
template <BlockFormat Format>
struct PlainTunings {
  static constexpr bool kIs8Bit = Format::Element::kBits == 8;
  using Rows = std::conditional_t<kIs8Bit, ShortRuns, DenseRuns>;
  using Flat = std::conditional_t<kIs8Bit, ShortRuns, FlatRuns>;
};

template <BlockFormat Format, class Math, class Half>
void launch_plain_dense(const QuantizeProblem& problem, const QuantizeParams& params,
                        Stream stream) {
  using Source = PlainRows<Half>;
  using Tunings = PlainTunings<Format>;
  using Rows = typename Tunings::Rows;
  const bool is_flat = params.scales.layout == ScaleLayoutId::kLinear &&
                       params.input_row_stride == problem.cols * Source::kInputBytes;
  if (!is_flat) return launch_quantize_dense<Format, Math, Source, Rows>(problem, params, stream);
  // Up to here the GPU holds every run at once in small blocks of threads.
  constexpr int64_t kFewElements = int64_t{1} << 19;
  const bool is_small = problem.rows * problem.cols <= kFewElements;
  const auto launch_with = [&]<class Tuning>() {
    const auto dense = make_dense_params(problem, params, Tuning::kConfig.run);
    visit_amax<Format>(problem, [&]<bool kIsAmax>() {
      launch_quantize_flat<Format, Math, Half, DenseCase<Tuning, kIsAmax>>(dense, stream);
    });
  };
  is_small ? launch_with.template operator()<DenseRuns>()
           : launch_with.template operator()<typename Tunings::Flat>();
}

// Which runs a source has kernels for: plain 16-bit tensors both, fp32 short ones, as 16 elements
// would not fit the registers, all others long ones. Formats with blocks and sources of 16 bits
// have dense kernels.
template <class Source>
inline constexpr bool kHasShortRuns = false;
template <class Half>
inline constexpr bool kHasShortRuns<PlainRows<Half>> = true;
template <>
inline constexpr bool kHasShortRuns<FloatRows> = true;
template <class Source>
inline constexpr bool kHasLongRuns = !std::is_same_v<Source, FloatRows>;
template <class Source>
inline constexpr bool kIsBusy = false;
template <class Half, class Math>
inline constexpr bool kIsBusy<SiluRows<Half, Math>> = true;
// Byte scales and what they are made from have one arithmetic; FP8 rules without a fast form are
// exact whatever the source is (effective_math).
template <BlockFormat Format, class Math, class Source>
inline constexpr bool kAgrees =
    !kHasByteScales<Format> || Source::kMathMode.value_or(Math::kMode) == Math::kMode;
template <BlockFormat Format, class Source>
inline constexpr bool kHasDense = Format::kBlockCols > 0 && Source::kInputBytes == 2;

// The 16-bit type of a plain tensor; void for other sources.
template <class Source>
struct PlainHalf {
  using Type = void;
};
template <class Half>
struct PlainHalf<PlainRows<Half>> {
  using Type = Half;
};

template <BlockFormat Format, class Math, class Source, class Tuning>
void launch_dense_or_blocks(const QuantizeProblem& problem, const QuantizeParams& params,
                            Stream stream) {
  if constexpr (kHasDense<Format, Source>) {
    using Half = typename PlainHalf<Source>::Type;
    if constexpr (!std::is_void_v<Half>) {
      if (is_dense(problem, ShortRuns::kConfig.run)) {
        return launch_plain_dense<Format, Math, Half>(problem, params, stream);
      }
    } else if (is_dense(problem, Tuning::kConfig.run)) {
      return launch_quantize_dense<Format, Math, Source, Tuning>(problem, params, stream);
    }
  }
  launch_quantize_blocks<Format, Math, Source, Tuning>(problem, params, stream);
}

template <BlockFormat Format>
void launch_quantize_blocks_of(const QuantizeProblem& problem, const QuantizeParams& params,
                               Stream stream) {
  constexpr bool kTakesE4m3 = Format::kId == FormatId::kNvfp4 || Format::kId == FormatId::kMxfp4;
  const int64_t elements = problem.batch * problem.rows * problem.cols;
  visit_device_math(effective_math(problem), [&]<class Math>() {
    visit_source<kTakesE4m3>(problem, [&]<class Source>() {
      if constexpr (kHasShortRuns<Source>) {
        if (elements < kLongRunElements || !kHasLongRuns<Source>) {
          return launch_dense_or_blocks<Format, Math, Source, ShortRuns>(problem, params, stream);
        }
      }
      if constexpr (kHasLongRuns<Source> && kAgrees<Format, Math, Source>) {
        using Tuning = std::conditional_t<kIsBusy<Source>, LongBusyRuns, LongRuns>;
        launch_dense_or_blocks<Format, Math, Source, Tuning>(problem, params, stream);
      }
    });
  });
}

}  // namespace narrowfloat
