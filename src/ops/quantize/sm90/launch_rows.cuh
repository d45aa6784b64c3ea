// Launching quantize_rows_kernel: the threads of a row, the grid, and very many rows in several
// launches.
#pragma once

#include <algorithm>

#include "ops/quantize/sm90/quantize_rows.cuh"
#include "ops/quantize/sm90/visit_sources.cuh"

namespace narrowfloat {

struct OneRun {
  static constexpr QuantizeRowsConfig kConfig{.runs = 1, .max_threads = 1024, .registers = 40};
  static_assert(is_valid(kConfig));
};
// Many rows: half the threads a row, so that more rows are in flight.
struct TwoRuns {
  static constexpr QuantizeRowsConfig kConfig{.runs = 2, .max_threads = 512, .registers = 56};
  static_assert(is_valid(kConfig));
};
struct OneNormRun {
  static constexpr QuantizeRowsConfig kConfig{.runs = 1, .max_threads = 1024, .registers = 56};
  static_assert(is_valid(kConfig));
};
struct TwoNormRuns {
  static constexpr QuantizeRowsConfig kConfig{.runs = 2, .max_threads = 512, .registers = 72};
  static_assert(is_valid(kConfig));
};
// SiLU and fp32.
struct OneLargeRun {
  static constexpr QuantizeRowsConfig kConfig{.runs = 1, .max_threads = 896, .registers = 72};
  static_assert(is_valid(kConfig));
};
struct LongRows {
  static constexpr QuantizeRowsConfig kConfig{
      .runs = 1, .max_threads = 512, .registers = 96, .is_long = true};
  static_assert(is_valid(kConfig));
};
struct FourOverSixRun {
  static constexpr QuantizeRowsConfig kConfig{
      .runs = 1, .max_threads = 1024, .registers = 64, .four_over_six = true};
  static_assert(is_valid(kConfig));
};
struct FourOverSixTwoRuns {
  static constexpr QuantizeRowsConfig kConfig{
      .runs = 2, .max_threads = 512, .registers = 80, .four_over_six = true};
  static_assert(is_valid(kConfig));
};
struct FourOverSixLongRows {
  static constexpr QuantizeRowsConfig kConfig{
      .runs = 1, .max_threads = 512, .registers = 96, .is_long = true, .four_over_six = true};
  static_assert(is_valid(kConfig));
};

// Sources with kernels for many rows, beside norms.
template <class Source>
inline constexpr bool kHasTwoRuns = false;
template <class Half>
inline constexpr bool kHasTwoRuns<WholeRows<PlainRows<Half>>> = true;

template <class Source>
inline constexpr bool kIsLarge = false;
template <>
inline constexpr bool kIsLarge<WholeRows<FloatRows>> = true;
template <class Half, class Math>
inline constexpr bool kIsLarge<WholeRows<SiluRows<Half, Math>>> = true;

// Threads for `cols` elements with `runs` runs each in as few chunks as possible.
struct RowShape {
  int threads;
  int num_chunks;
};

inline RowShape row_shape(int64_t cols, const QuantizeRowsConfig& config) {
  const int64_t runs = ceil_div(cols, kRowRun);
  const int64_t chunks = ceil_div(runs, int64_t{config.max_threads} * config.runs);
  const int64_t threads = ceil_div(runs, chunks * config.runs);
  return {static_cast<int>(round_up(threads, kWarpSize)), static_cast<int>(chunks)};
}

// Rows of one launch: the grid's first axis holds 2^31 - 1 blocks, padding included.
inline constexpr int64_t kMaxLaunchRows = int64_t{1} << 30;

template <BlockFormat Format, class Math, class Source, class Tuning>
void launch_quantize_rows(const QuantizeProblem& problem, const QuantizeParams& params,
                          Stream stream) {
  const RowShape shape = row_shape(problem.value_cols, Tuning::kConfig);
  // Images of listed rows and of row groups were cleared: they have gaps.
  const bool is_cleared = problem.has_row_list || problem.groups > 0;
  const int64_t rows = problem.has_row_list ? params.num_listed_rows : problem.batch * problem.rows;
  for (int64_t first = 0; first < rows; first += kMaxLaunchRows) {
    const auto num_rows = static_cast<uint32_t>(std::min(kMaxLaunchRows, rows - first));
    QuantizeRowsGrid grid{.first_row = first, .num_rows = num_rows, .num_chunks = shape.num_chunks};
    int64_t padding_blocks = 0;
    if (first == 0 && !is_cleared) {
      grid.padding = scale_padding(params.scales);
      grid.extra_padding = scale_padding(params.extra_scales);
      const int64_t pieces = std::max(grid.padding.per_image(), grid.extra_padding.per_image());
      padding_blocks = ceil_div(pieces * problem.batch, shape.threads);
    }
    const dim3 blocks(num_rows + static_cast<unsigned>(padding_blocks));
    launch(quantize_rows_kernel<Format, Math, Source, Tuning>,
           {blocks, dim3(static_cast<unsigned>(shape.threads))}, stream, params, grid);
  }
}

template <class Tuning>
inline bool holds_rows_of(const QuantizeProblem& problem) {
  return row_shape(problem.value_cols, Tuning::kConfig).num_chunks <= 1;
}

// kTwoRunRows of norms, whose one-run kernels have no more than two rows on an SM.
inline constexpr int64_t kTwoNormRunRows = 265;

template <class Tuning>
bool takes_two_runs(const QuantizeProblem& problem) {
  const int64_t least = is_norm(problem.source) ? kTwoNormRunRows : kTwoRunRows;
  return holds_rows_of<Tuning>(problem) && problem.batch * problem.rows >= least;
}

// By a tuning if it holds a row, else as long rows.
template <BlockFormat Format, class Math, class Source, class Tuning>
void launch_quantize_whole_rows(const QuantizeProblem& problem, const QuantizeParams& params,
                                Stream stream) {
  if (holds_rows_of<Tuning>(problem)) {
    launch_quantize_rows<Format, Math, Source, Tuning>(problem, params, stream);
  } else {
    using Long = std::conditional_t<Tuning::kConfig.four_over_six, FourOverSixLongRows, LongRows>;
    launch_quantize_rows<Format, Math, Source, Long>(problem, params, stream);
  }
}

// Calls visitor.template operator()<Source>() with the source of the problem's rows, for formats
// whose arithmetic is that of the problem and that take no E4M3 input.
template <class Math, typename Visitor>
void visit_row_source(const QuantizeProblem& problem, Visitor&& visitor) {
  switch (problem.source) {
    case RowSourceKind::kSmooth:
      return visitor.template operator()<WholeRows<SmoothRows>>();
    case RowSourceKind::kSiluMul:
      return visit_half(problem.input, [&]<class Half>() {
        visitor.template operator()<WholeRows<SiluRows<Half, Math>>>();
      });
    case RowSourceKind::kPlain:
      if (problem.input == DType::kF32) {
        return visitor.template operator()<WholeRows<FloatRows>>();
      }
      return visit_half(problem.input, [&]<class Half>() {
        visitor.template operator()<WholeRows<PlainRows<Half>>>();
      });
    case RowSourceKind::kRmsNorm:
    case RowSourceKind::kAddRmsNorm:
      return visit_half(problem.input,
                        [&]<class Half>() { visitor.template operator()<NormRows<Half>>(); });
  }
}

// Norms into a format whose blocks lie inside a row.
template <BlockFormat Format>
void launch_quantize_norm_rows(const QuantizeProblem& problem, const QuantizeParams& params,
                               Stream stream) {
  visit_device_math(effective_math(problem), [&]<class Math>() {
    visit_half(problem.input, [&]<class Half>() {
      using Source = NormRows<Half>;
      if (takes_two_runs<TwoNormRuns>(problem)) {
        return launch_quantize_rows<Format, Math, Source, TwoNormRuns>(problem, params, stream);
      }
      launch_quantize_whole_rows<Format, Math, Source, OneNormRun>(problem, params, stream);
    });
  });
}

// NVFP4 with 4-over-6 from any source.
template <BlockFormat Format>
void launch_quantize_four_over_six_rows(const QuantizeProblem& problem,
                                        const QuantizeParams& params, Stream stream) {
  visit_device_math(problem.math, [&]<class Math>() {
    visit_row_source<Math>(problem, [&]<class Source>() {
      if constexpr (kHasTwoRuns<Source>) {
        if (takes_two_runs<FourOverSixTwoRuns>(problem)) {
          return launch_quantize_rows<Format, Math, Source, FourOverSixTwoRuns>(problem, params,
                                                                                stream);
        }
      }
      launch_quantize_whole_rows<Format, Math, Source, FourOverSixRun>(problem, params, stream);
    });
  });
}

}  // namespace narrowfloat
