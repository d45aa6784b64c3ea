// Launching quantize_blocks_kernel: the tuning by size, the grid, and very large tensors in several
// launches.
#pragma once

#include <algorithm>

#include "ops/quantize/sm90/quantize_blocks.cuh"
#include "ops/quantize/sm90/visit_sources.cuh"
#include "runtime/cuda/cuda_devices.h"

namespace narrowfloat {

// Few elements: short runs, so that more threads share the latency.
struct ShortRuns {
  static constexpr QuantizeBlocksConfig kConfig{.threads = 256, .run = 8};
  static_assert(is_valid(kConfig));
};
// Many: a block of threads must move more than the 3.6 KB that memory moves while the GPU starts
// one.
struct LongRuns {
  static constexpr QuantizeBlocksConfig kConfig{.threads = 256, .run = 16};
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

// Which runs a source has kernels for: plain 16-bit tensors both, fp32 short ones, as 16 elements
// would not fit the registers, all others long ones.
template <class Source>
inline constexpr bool kHasShortRuns = false;
template <class Half>
inline constexpr bool kHasShortRuns<PlainRows<Half>> = true;
template <>
inline constexpr bool kHasShortRuns<FloatRows> = true;
template <class Source>
inline constexpr bool kHasLongRuns = !std::is_same_v<Source, FloatRows>;

template <BlockFormat Format>
void launch_quantize_blocks_of(const QuantizeProblem& problem, const QuantizeParams& params,
                               Stream stream) {
  constexpr bool kTakesE4m3 = Format::kId == FormatId::kNvfp4 || Format::kId == FormatId::kMxfp4;
  visit_device_math(effective_math(problem), [&]<class Math>() {
    visit_source<kTakesE4m3>(problem, [&]<class Source>() {
      if constexpr (kHasShortRuns<Source>) {
        const bool is_short = problem.batch * problem.rows * problem.cols < kLongRunElements;
        if (is_short || !kHasLongRuns<Source>) {
          return launch_quantize_blocks<Format, Math, Source, ShortRuns>(problem, params, stream);
        }
      }
      if constexpr (kHasLongRuns<Source>) {
        launch_quantize_blocks<Format, Math, Source, LongRuns>(problem, params, stream);
      }
    });
  });
}

}  // namespace narrowfloat
