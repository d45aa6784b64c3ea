// Selects the variant of quantize_rows.cuh: the first of a table that takes the problem, or the
// general one for every source and any number of columns.
//
// A variant stays in a table as long as a benchmark row is at least 3 % faster with it than with
// the variants after it (docs/kernels/quantize.md has the figures).
#pragma once

#include <algorithm>

#include "ops/quantize/sm90/quantize_rows.cuh"
#include "ops/quantize/sm90/variant_table.cuh"
#include "ops/quantize/sm90/visit_sources.cuh"
#include "runtime/cuda/launch.h"

namespace narrowfloat {

// --- Tunings -------------------------------------------------------------------------------------

struct OneNormRun {
  static constexpr QuantizeRowsConfig kConfig{.runs = 1, .max_threads = 1024, .registers = 56};
  static_assert(is_valid(kConfig));
};
// Half the threads per row, so that more rows are in flight.
struct TwoNormRuns {
  static constexpr QuantizeRowsConfig kConfig{.runs = 2, .max_threads = 512, .registers = 72};
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

// --- Launches ------------------------------------------------------------------------------------

// The threads for `cols` elements with `runs` runs each in as few chunks as possible.
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

// Rows of one launch: the grid's first axis holds 2^31 - 1 CTAs, padding included.
inline constexpr int64_t kMaxLaunchRows = int64_t{1} << 30;

template <BlockFormat Format, class Math, class Source, class Tuning>
void launch_quantize_rows(const QuantizeProblem& problem, const QuantizeParams& params,
                          Stream stream) {
  const RowShape shape = row_shape(problem.value_cols, Tuning::kConfig);
  // The scales of listed rows and of row groups have gaps and were cleared before.
  const bool is_cleared = problem.has_row_list || problem.groups > 0;
  const int64_t rows = problem.has_row_list ? params.num_listed_rows : problem.batch * problem.rows;
  for (int64_t first = 0; first < rows; first += kMaxLaunchRows) {
    const auto num_rows = static_cast<uint32_t>(std::min(kMaxLaunchRows, rows - first));
    QuantizeRowsGrid grid{.first_row = first, .num_rows = num_rows, .num_chunks = shape.num_chunks};
    int64_t padding_ctas = 0;
    if (first == 0 && !is_cleared) {
      grid.padding = scale_padding(params.scales);
      grid.extra_padding = scale_padding(params.extra_scales);
      const int64_t pieces = std::max(grid.padding.per_tensor(), grid.extra_padding.per_tensor());
      padding_ctas = ceil_div(pieces * problem.batch, shape.threads);
    }
    const dim3 ctas(num_rows + static_cast<unsigned>(padding_ctas));
    launch(quantize_rows_kernel<Format, Math, Source, Tuning>,
           {ctas, dim3(static_cast<unsigned>(shape.threads))}, stream, params, grid);
  }
}

// Rows of one source that fit the registers of a CTA, at least kMinRows of them.
template <RowInput kInput, class Source, class Tuning, int64_t kMinRows>
struct RowsVariant : BothMaths {
  template <BlockFormat Format, class Math>
  static bool takes(const QuantizeProblem& problem, const QuantizeParams& params) {
    return params.row_input == kInput && problem.batch * problem.rows >= kMinRows &&
           problem.four_over_six.enabled == Tuning::kConfig.four_over_six &&
           row_shape(problem.value_cols, Tuning::kConfig).num_chunks <= 1;
  }
  template <BlockFormat Format, class Math>
  static void launch_kernel(const QuantizeProblem& problem, const QuantizeParams& params,
                            Stream stream) {
    launch_quantize_rows<Format, Math, Source, Tuning>(problem, params, stream);
  }
};

// --- The tables ----------------------------------------------------------------------------------

// With fewer rows a kernel with two runs per thread cannot fill the GPU.
inline constexpr int64_t kRowsTwoRunRows = 265;

// The comment of a row is its gain over the rows after it, with K = 7168.
using Norm4BitTable =
    VariantTable<RowsVariant<RowInput::kNormBf16, NormRows<PackedBf16>, TwoNormRuns,
                             kRowsTwoRunRows>,  // add + RMSNorm, 16384 rows: 3 %
                 RowsVariant<RowInput::kNormBf16, NormRows<PackedBf16>, OneNormRun,
                             0>>;  // add + RMSNorm, 1 row: 24 %
using Norm8BitTable = VariantTable<RowsVariant<RowInput::kNormBf16, NormRows<PackedBf16>,
                                               OneNormRun, 0>>;  // add + RMSNorm, 1 row: 28 %

using FourOverSixTable =
    VariantTable<RowsVariant<RowInput::kBf16, WholeRows<PlainRows<PackedBf16>>, FourOverSixTwoRuns,
                             kRowsTwoRunRows>,  // per token, 1024 rows: 13 %
                 RowsVariant<RowInput::kBf16, WholeRows<PlainRows<PackedBf16>>, FourOverSixRun,
                             0>>;  // 1 row: 37 %

template <BlockFormat Format, class Table, class GeneralTuning>
void launch_quantize_rows_of(const QuantizeProblem& problem, const QuantizeParams& params,
                             Stream stream) {
  visit_device_math(effective_math(problem), [&]<class Math>() {
    if (Table::template launch_first<Format, Math>(problem, params, stream)) return;
    launch_quantize_rows<Format, Math, AnyWholeRows<Format, Math>, GeneralTuning>(problem, params,
                                                                                  stream);
  });
}

}  // namespace narrowfloat
