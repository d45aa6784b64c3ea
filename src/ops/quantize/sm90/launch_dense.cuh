// Selects the kernel for formats whose blocks lie inside a row: the first variant of
// quantize_dense.cuh in the format's table that takes the problem, else the general kernel of
// quantize_blocks.cuh, in several launches for very large tensors.
//
// A variant stays in a table as long as a benchmark row is at least 3 % faster with it than with
// the variants after it (docs/kernels/quantize.md has the figures).
#pragma once

#include <algorithm>

#include "ops/quantize/sm90/quantize_blocks.cuh"
#include "ops/quantize/sm90/quantize_dense.cuh"
#include "ops/quantize/sm90/variant_table.cuh"
#include "ops/quantize/sm90/visit_sources.cuh"

namespace narrowfloat {

// --- Tunings -------------------------------------------------------------------------------------

// 4-bit codes: a CTA moves 5 KB, more than the 3.6 KB that memory moves while the GPU starts one.
struct FourBitRuns {
  static constexpr QuantizeDenseConfig kConfig{.threads = 128, .run = 16, .ctas_per_sm = 10};
  static_assert(is_valid(kConfig));
};
// 8-bit codes: the loads and stores of a warp are whole cache lines.
struct EightBitRuns {
  static constexpr QuantizeDenseConfig kConfig{.threads = 256, .run = 8, .ctas_per_sm = 8};
  static_assert(is_valid(kConfig));
};
struct SmoothRuns {
  static constexpr QuantizeDenseConfig kConfig{.threads = 256, .run = 16, .ctas_per_sm = 5};
  static_assert(is_valid(kConfig));
};
// SiLU has much arithmetic: small CTAs and at most 40 registers let the loads of some CTAs overlap
// the arithmetic of others.
struct SiluRuns {
  static constexpr QuantizeDenseConfig kConfig{.threads = 128, .run = 16, .ctas_per_sm = 12};
  static_assert(is_valid(kConfig));
};

// --- The general kernel --------------------------------------------------------------------------

template <BlockFormat Format, class Math, class Rows = BlocksOfAny<Format, Math>>
void launch_quantize_blocks(const QuantizeProblem& problem, const QuantizeParams& params,
                            Stream stream) {
  constexpr int64_t kBlock = std::max<int64_t>(Format::kBlockCols, Rows::kRun);
  const int64_t runs_per_row = ceil_div(problem.value_cols, kBlock) * (kBlock / Rows::kRun);
  const int64_t rows = problem.batch * problem.rows;
  // A 31-bit number counts the runs of a launch.
  const int64_t rows_at_once =
      std::max<int64_t>(1, ((int64_t{1} << 31) - 2 * kBlocksThreads) / runs_per_row);
  for (int64_t first = 0; first < rows; first += rows_at_once) {
    const int64_t num_rows = std::min(rows_at_once, rows - first);
    QuantizeBlocksGrid grid{.first_row = first,
                            .num_rows = static_cast<uint32_t>(num_rows),
                            .runs_per_row = FastDivisor(static_cast<uint32_t>(runs_per_row))};
    grid.element_ctas = static_cast<uint32_t>(ceil_div(num_rows * runs_per_row, kBlocksThreads));
    int64_t padding_ctas = 0;
    if (first == 0) {
      grid.padding = scale_padding(params.scales);
      padding_ctas = ceil_div(grid.padding.per_tensor() * problem.batch, kBlocksThreads);
    }
    const dim3 ctas(grid.element_ctas + static_cast<unsigned>(padding_ctas));
    launch(quantize_blocks_kernel<Format, Math, Rows>, {ctas, dim3(kBlocksThreads)}, stream, params,
           grid);
  }
}

// --- The dense kernels ---------------------------------------------------------------------------

// True if the dense and flat kernels take the problem, with runs of `run` elements.
inline bool is_dense(const QuantizeProblem& problem, int64_t run) {
  constexpr int64_t kMaxRuns = (int64_t{1} << 31) - 2048;
  const FormatInfo& info = format_info(problem.format);
  return problem.batch == 1 && !problem.has_valid_rows && problem.groups == 0 &&
         problem.encode_axis == EncodeScaleAxis::kTensor && problem.value_cols == problem.cols &&
         problem.cols % info.block_cols == 0 && problem.rows * (problem.cols / run) < kMaxRuns;
}

// Sets the pieces of the last row of tiles for clear_last_tiles().
inline void set_padding(const ScaleTensors& tensors, QuantizeDenseParams& dense) {
  if (tensors.layout == ScaleLayoutId::kLinear) return;
  const int64_t rows = tensors.extents.rows;
  const int64_t stride = dense.layout_stride;
  int64_t tile_rows = 128;  // With one more tile per row, bytes and pieces grow by:
  int64_t tile_bytes = 512;
  int64_t pieces = stride * 32;
  if (tensors.layout == ScaleLayoutId::kSwizzled8x4) {
    tile_rows = 8;
    tile_bytes = 32;
    pieces = stride * 8;
  }
  if (tensors.layout == ScaleLayoutId::kMnMajor) {
    tile_rows = 4;
    pieces = tensors.extents.blocks * 4;
  }
  if (rows % tile_rows == 0) return;
  const bool is_mn_major = tensors.layout == ScaleLayoutId::kMnMajor;
  const int64_t first = rows / tile_rows * (is_mn_major ? 16 : tile_bytes * stride);
  dense.last_tiles = tensors.data + first;
  dense.last_tile_rows = static_cast<uint32_t>(rows % tile_rows);
  dense.padding_pieces = static_cast<uint32_t>(pieces);
}

inline QuantizeDenseParams make_dense_params(const QuantizeProblem& problem,
                                             const QuantizeParams& params, int64_t run) {
  const int64_t runs_per_row = problem.cols / run;
  const ScaleExtents& extents = params.scales.extents;
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
  dense.is_amax = params.encode_source == EncodeScaleSource::kAmax;
  if (params.encode_source == EncodeScaleSource::kTensor) dense.device_scale = params.encode_scales;
  if (dense.is_amax) dense.device_scale = params.global_scale;
  dense.e4m3_max = params.e4m3_max;
  dense.host_encode = params.host_pair.encode;
  dense.global_scale = params.global_scale;
  dense.rules = params.rules;
  set_padding(params.scales, dense);
  return dense;
}

// Rows of one source, with scales in any layout or in the given one.
template <class SourceOf, class Tuning, DeviceScale kScale, ScaleLayoutId... kLayouts>
struct DenseVariant : SourceOf::Maths {
  template <BlockFormat Format, class Math>
  static bool takes(const QuantizeProblem& problem, const QuantizeParams& params) {
    const bool is_amax = params.encode_source == EncodeScaleSource::kAmax;
    const bool has_scale =
        kScale == DeviceScale::kEither || is_amax == (kScale == DeviceScale::kAmax);
    const bool has_layout = sizeof...(kLayouts) == 0 || ((problem.layout == kLayouts) || ...);
    return params.row_input == SourceOf::kInput && has_scale && has_layout &&
           SourceOf::template agrees<Format, Math>(params) &&
           is_dense(problem, Tuning::kConfig.run);
  }

  template <BlockFormat Format, class Math>
  static void launch_kernel(const QuantizeProblem& problem, const QuantizeParams& params,
                            Stream stream) {
    using Case = DenseCase<Tuning, kScale, kLayouts...>;
    using Source = typename SourceOf::template Source<Math>;
    constexpr int kThreads = Case::kConfig.threads;
    QuantizeDenseParams dense = make_dense_params(problem, params, Case::kConfig.run);
    dense.element_ctas = static_cast<uint32_t>(ceil_div(dense.num_runs, kThreads));
    const auto padding = static_cast<uint32_t>(ceil_div(dense.padding_pieces, kThreads));
    launch(quantize_dense_kernel<Format, Math, Source, Case>,
           {dim3(dense.element_ctas + padding), dim3(kThreads)}, stream, dense);
  }
};

// A bf16 tensor without gaps between its rows, with linear scales.
template <class Tuning>
struct FlatVariant : BothMaths {
  template <BlockFormat Format, class Math>
  static bool takes(const QuantizeProblem& problem, const QuantizeParams& params) {
    return params.row_input == RowInput::kBf16 &&
           params.encode_source != EncodeScaleSource::kAmax &&
           problem.layout == ScaleLayoutId::kLinear &&
           params.input_row_stride == problem.cols * int64_t{sizeof(uint16_t)} &&
           is_dense(problem, Tuning::kConfig.run);
  }

  template <BlockFormat Format, class Math>
  static void launch_kernel(const QuantizeProblem& problem, const QuantizeParams& params,
                            Stream stream) {
    using Case = DenseCase<Tuning, DeviceScale::kEncode>;
    constexpr int kThreads = Case::kConfig.threads;
    const QuantizeDenseParams dense = make_dense_params(problem, params, Case::kConfig.run);
    const QuantizeFlatParams flat{.input = dense.input,
                                  .values = dense.values,
                                  .scales = dense.scales,
                                  .num_runs = dense.num_runs,
                                  .device_scale = dense.device_scale,
                                  .host_encode = dense.host_encode,
                                  .rules = dense.rules,
                                  .global_scale = dense.global_scale,
                                  .e4m3_max = dense.e4m3_max};
    const dim3 ctas(static_cast<unsigned>(ceil_div(flat.num_runs, kThreads)));
    launch(quantize_flat_kernel<Format, Math, PackedBf16, Case>, {ctas, dim3(kThreads)}, stream,
           flat);
  }
};

// The sources of DenseVariant. agrees() is true if the arithmetic of the source is that of the
// format, for which the kernel is compiled.
struct AlwaysAgrees {
  template <BlockFormat Format, class Math>
  static bool agrees(const QuantizeParams& /*params*/) {
    return true;
  }
};
struct Bf16Source : AlwaysAgrees {
  using Maths = BothMaths;
  static constexpr RowInput kInput = RowInput::kBf16;
  template <class Math>
  using Source = PlainRows<PackedBf16>;
};
struct F16Source : AlwaysAgrees {
  using Maths = ExactMathOnly;
  static constexpr RowInput kInput = RowInput::kF16;
  template <class Math>
  using Source = PlainRows<PackedF16>;
};
template <class MathsOf>
struct SmoothSource : AlwaysAgrees {
  using Maths = MathsOf;
  static constexpr RowInput kInput = RowInput::kSmooth;
  template <class Math>
  using Source = SmoothRows;
};
struct SiluSource {
  using Maths = BothMaths;
  static constexpr RowInput kInput = RowInput::kSiluBf16;
  template <class Math>
  using Source = SiluRows<PackedBf16, Math>;
  template <BlockFormat Format, class Math>
  static bool agrees(const QuantizeParams& params) {
    return params.is_fast == (Math::kMode == MathMode::kFast);
  }
};

// --- The tables ----------------------------------------------------------------------------------

template <class Tuning, DeviceScale kScale, ScaleLayoutId... kLayouts>
using Bf16Rows = DenseVariant<Bf16Source, Tuning, kScale, kLayouts...>;
template <class Tuning>
using F16Rows = DenseVariant<F16Source, Tuning, DeviceScale::kEncode>;
template <ScaleLayoutId... kLayouts>
using SiluBf16Rows = DenseVariant<SiluSource, SiluRuns, DeviceScale::kEither, kLayouts...>;
template <class Maths>
using SmoothBf16Rows = DenseVariant<SmoothSource<Maths>, SmoothRuns, DeviceScale::kEither>;

inline constexpr ScaleLayoutId k128x4 = ScaleLayoutId::kSwizzled128x4;
inline constexpr ScaleLayoutId kMnMajor = ScaleLayoutId::kMnMajor;

// The comment of a variant is its gain over those after it on the benchmark row that it wins: its
// format, source and scale layout, K = 7168, and one row unless the comment names another number.
template <BlockFormat Format>
struct DenseTable;

template <>
struct DenseTable<Nvfp4> {
  using Variants = VariantTable<FlatVariant<FourBitRuns>,                             // 13 %
                                Bf16Rows<FourBitRuns, DeviceScale::kEncode, k128x4>,  // 5 %
                                Bf16Rows<FourBitRuns, DeviceScale::kEncode>,          // 80 %
                                Bf16Rows<FourBitRuns, DeviceScale::kAmax>,            // 26 %
                                F16Rows<FourBitRuns>,                                 // 80 %
                                SiluBf16Rows<k128x4>,                                 // 9 %
                                SiluBf16Rows<>,                                       // 64 %
                                SmoothBf16Rows<BothMaths>>;                           // 23 %
};

template <>
struct DenseTable<Mxfp4> {
  using Variants =
      VariantTable<FlatVariant<FourBitRuns>,                             // 45 %
                   Bf16Rows<FourBitRuns, DeviceScale::kEncode, k128x4>,  // 4 %, 128 rows
                   Bf16Rows<FourBitRuns, DeviceScale::kEncode>,          // 43 %
                   F16Rows<FourBitRuns>,                                 // 43 %
                   SiluBf16Rows<k128x4>,                                 // 4 %
                   SiluBf16Rows<>,                                       // 41 %
                   SmoothBf16Rows<ExactMathOnly>>;                       // 23 %
};

template <>
struct DenseTable<Mxfp8> {
  using Variants = VariantTable<FlatVariant<EightBitRuns>,  // 5 %, 128 rows
                                Bf16Rows<EightBitRuns, DeviceScale::kEncode, k128x4>,  // 6 %
                                Bf16Rows<EightBitRuns, DeviceScale::kEncode>,          // 42 %
                                F16Rows<EightBitRuns>,                                 // 42 %
                                SiluBf16Rows<k128x4>,                                  // 8 %
                                SiluBf16Rows<>,                                        // 59 %
                                SmoothBf16Rows<ExactMathOnly>>;                        // 17 %
};

template <>
struct DenseTable<Fp8Block1x128> {
  using Variants = VariantTable<FlatVariant<EightBitRuns>,                               // 25 %
                                Bf16Rows<EightBitRuns, DeviceScale::kEncode, kMnMajor>,  // 42 %
                                Bf16Rows<EightBitRuns, DeviceScale::kEncode>,            // 40 %
                                F16Rows<EightBitRuns>,                                   // 40 %
                                SiluBf16Rows<kMnMajor>,                                  // 10 %
                                SiluBf16Rows<>,                                          // 57 %
                                SmoothBf16Rows<ExactMathOnly>>;                          // 16 %
};

// The general kernel on bf16; other formats have dense kernels for bf16.
struct BlocksVariant : BothMaths {
  template <BlockFormat Format, class Math>
  static bool takes(const QuantizeProblem& /*problem*/, const QuantizeParams& params) {
    return params.row_input == RowInput::kBf16;
  }
  template <BlockFormat Format, class Math>
  static void launch_kernel(const QuantizeProblem& problem, const QuantizeParams& params,
                            Stream stream) {
    launch_quantize_blocks<Format, Math, BlocksOfBf16>(problem, params, stream);
  }
};

template <>
struct DenseTable<Fp8Tensor> {
  using Variants = VariantTable<BlocksVariant>;  // 28 %
};

template <BlockFormat Format>
void launch_quantize_blocks_of(const QuantizeProblem& problem, const QuantizeParams& params,
                               Stream stream) {
  visit_device_math(effective_math(problem), [&]<class Math>() {
    using Variants = typename DenseTable<Format>::Variants;
    if (Variants::template launch_first<Format, Math>(problem, params, stream)) return;
    launch_quantize_blocks<Format, Math>(problem, params, stream);
  });
}

}  // namespace narrowfloat
