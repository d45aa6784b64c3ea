// This file launches the kernel of quantize_token_dense.cuh. It says which problems the kernel
// takes and selects the tuning.
#include "ops/quantize/sm90/quantize_rows.h"
#include "ops/quantize/sm90/quantize_token_dense.cuh"
#include "ops/quantize/sm90/visit_sources.cuh"

namespace narrowfloat {
namespace {

// The tuning for a small number of rows: all threads share the latency.
struct OneTokenRun {
  static constexpr QuantizeTokenConfig kConfig{.runs = 1, .max_threads = 1024, .registers = 32};
  static_assert(is_valid(kConfig));
};
// The tuning for many rows: more bytes are in flight.
struct TwoTokenRuns {
  static constexpr QuantizeTokenConfig kConfig{.runs = 2, .max_threads = 512, .registers = 48};
  static_assert(is_valid(kConfig));
};

template <class Half, class Math, class Tuning, class Base>
void launch_token_dense(const QuantizeProblem& problem, const QuantizeParams& params,
                        Stream stream) {
  constexpr int64_t kRuns = Tuning::kConfig.runs;
  const int64_t runs = problem.cols / kRowRun;
  const int64_t threads = round_up(ceil_div(runs, kRuns), kWarpSize);
  const ScalePadding padding = scale_padding(params.scales);
  const QuantizeTokenParams token{
      .input = params.input,
      .input_row_stride = params.input_row_stride,
      .runs_per_row = static_cast<uint32_t>(runs),
      .num_rows = static_cast<uint32_t>(problem.rows),
      .values = params.values,
      .scales = params.scales.data,
      .row_scales = params.global_scale,
      .layout = params.scales.layout,
      .tiles_per_row = static_cast<uint32_t>(ceil_div(runs, 4)),
      .base = {params.base_decode_scale, 1.0F / params.base_decode_scale},
      .device_base = params.device_base,
      .scale_tensors = params.scales,
      .padding = padding};
  const int64_t blocks = problem.rows + ceil_div(padding.per_tensor(), threads);
  const LaunchShape shape{dim3(static_cast<unsigned>(blocks)),
                          dim3(static_cast<unsigned>(threads))};
  launch(quantize_token_dense_kernel<Half, Math, Tuning, Base>, shape, stream, token);
}

}  // namespace

bool is_token_dense(const QuantizeProblem& problem) {
  constexpr int64_t kMaxCols = 16384;
  constexpr int64_t kMaxRuns = int64_t{1} << 30;
  const bool is_half = problem.input == DType::kBF16 || problem.input == DType::kF16;
  const bool has_all_rows = problem.batch == 1 && !problem.has_row_list && !problem.has_valid_rows;
  return problem.format == FormatId::kNvfp4PerToken && problem.source == RowSourceKind::kPlain &&
         is_half && has_all_rows && problem.layout != ScaleLayoutId::kMnMajor &&
         problem.value_cols == problem.cols && problem.cols % kRowRun == 0 &&
         problem.cols <= kMaxCols && problem.rows * (problem.cols / kRowRun) < kMaxRuns;
}

void launch_quantize_token_dense(const QuantizeProblem& problem, const QuantizeParams& params,
                                 Stream stream) {
  visit_device_math(problem.math, [&]<class Math>() {
    if (problem.input == DType::kF16) {
      return problem.rows < kTokenDenseTwoRunRows
                 ? launch_token_dense<PackedF16, Math, OneTokenRun, BaseOfAny>(problem, params,
                                                                               stream)
                 : launch_token_dense<PackedF16, Math, TwoTokenRuns, BaseOfAny>(problem, params,
                                                                                stream);
    }
    if (problem.rows >= kTokenDenseTwoRunRows) {
      return launch_token_dense<PackedBf16, Math, TwoTokenRuns, BaseOfAny>(problem, params, stream);
    }
    if (params.device_base == nullptr) {
      return launch_token_dense<PackedBf16, Math, OneTokenRun, BaseOfHost>(problem, params, stream);
    }
    launch_token_dense<PackedBf16, Math, OneTokenRun, BaseOfAny>(problem, params, stream);
  });
}

}  // namespace narrowfloat
