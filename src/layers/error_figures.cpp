// See error_figures.h for the order of summation.
#include "layers/error_figures.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/assert.h"
#include "base/int_math.h"
#include "formats/float16.h"
#include "runtime/parallel.h"

namespace narrowfloat {
namespace {

constexpr int64_t kRowGrainElements = 1 << 14;

double load(DType dtype, const std::byte* data, int64_t index) {
  const auto at = [&]<typename T>(T value) {
    std::memcpy(&value, data + static_cast<size_t>(index) * sizeof(T), sizeof(T));
    return value;
  };
  switch (dtype) {
    case DType::kF64:
      return at(double{});
    case DType::kF32:
      return static_cast<double>(at(float{}));
    case DType::kF16:
      return static_cast<double>(f16_to_float(at(uint16_t{})));
    default:
      return static_cast<double>(bf16_to_float(at(uint16_t{})));
  }
}

// Elements of a row that are widened at a time, so that memory does not depend on the columns.
constexpr int64_t kPieceElements = 1 << 11;

struct RowPiece {
  std::array<double, kPieceElements> x;
  std::array<double, kPieceElements> y;
  std::array<double, kPieceElements>
      limits;  // One for each block; no block is larger than a piece.
};

// Adds elements [first, first + count) of a row. block_cols: 0 where there are no limits.
void add_piece(ErrorSums& sums, const RowPiece& piece, int64_t first, int64_t count,
               int64_t block_cols) {
  const auto size = static_cast<size_t>(count);
  for (size_t i = 0; i < size; ++i) {
    const double x = piece.x[i];
    const double y = piece.y[i];
    if (!std::isfinite(x) || !std::isfinite(y)) {
      ++sums.nonfinite;
      continue;
    }
    const double error = x - y;
    sums.error_squares += error * error;
    sums.x_squares += x * x;
    sums.y_squares += y * y;
    sums.products += x * y;
    if (x != 0 && y == 0) ++sums.flushed;
    if (block_cols != 0) {
      ++sums.limited;
      if (std::abs(x) > piece.limits[i / static_cast<size_t>(block_cols)]) ++sums.clipped;
    }
    if (std::abs(error) > sums.max_abs) {
      sums.max_abs = std::abs(error);
      sums.max_abs_index = first + static_cast<int64_t>(i);
    }
  }
}

ErrorSums sums_of_row(const FloatRows& x, const FloatRows& y, int64_t row, int64_t cols,
                      const ClipLimits* limits, RowPiece& piece) {
  ErrorSums sums;
  sums.elements = cols;
  sums.max_abs = -1;  // So that the first element counts.
  const int64_t block_cols = limits != nullptr ? limits->block_cols : 0;
  const int64_t step =
      limits != nullptr ? kPieceElements / block_cols * block_cols : kPieceElements;
  NF_ASSERT(step > 0);
  for (int64_t first = 0; first < cols; first += step) {
    const int64_t count = std::min(step, cols - first);
    const auto size = static_cast<size_t>(count);
    widen(x, row * cols + first, std::span(piece.x).first(size));
    widen(y, row * cols + first, std::span(piece.y).first(size));
    if (limits != nullptr) {
      const auto num_blocks = static_cast<size_t>(ceil_div(count, block_cols));
      limits->of_blocks(row, first / block_cols, std::span(piece.limits).first(num_blocks));
    }
    add_piece(sums, piece, first, count, block_cols);
  }
  return sums;
}

double ratio_or(double numerator, double denominator, double if_both_zero, double if_zero) {
  if (denominator != 0) return numerator / denominator;
  return numerator == 0 ? if_both_zero : if_zero;
}

}  // namespace

ErrorSums merged(const ErrorSums& earlier, const ErrorSums& later) {
  ErrorSums sum = earlier;
  sum.elements += later.elements;
  sum.nonfinite += later.nonfinite;
  sum.limited += later.limited;
  sum.clipped += later.clipped;
  sum.flushed += later.flushed;
  sum.error_squares += later.error_squares;
  sum.x_squares += later.x_squares;
  sum.y_squares += later.y_squares;
  sum.products += later.products;
  if (later.max_abs > earlier.max_abs) {
    sum.max_abs = later.max_abs;
    sum.max_abs_index = later.max_abs_index;
  }
  return sum;
}

ErrorFigures figures_of(const ErrorSums& sums) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  ErrorFigures figures;
  figures.elements = sums.elements;
  figures.nonfinite = sums.nonfinite;
  const auto count = static_cast<double>(sums.elements - sums.nonfinite);
  if (count == 0) {
    figures.sqnr_db = kInfinity;
    if (sums.nonfinite == 0) return figures;
    // Nothing is left to compare; the figures of equal tensors would be a lie.
    constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
    figures.mse = figures.relative_error = figures.sqnr_db = kUnknown;
    figures.cosine = figures.norm_ratio = kUnknown;
    return figures;
  }
  figures.mse = sums.error_squares / count;
  figures.relative_error = std::sqrt(ratio_or(sums.error_squares, sums.x_squares, 0.0, kInfinity));
  figures.sqnr_db =
      figures.relative_error == 0 ? kInfinity : -20.0 * std::log10(figures.relative_error);
  const double norms = std::sqrt(sums.x_squares) * std::sqrt(sums.y_squares);
  const bool both_zero = sums.x_squares == 0 && sums.y_squares == 0;
  figures.cosine = norms != 0 ? sums.products / norms : (both_zero ? 1.0 : 0.0);
  figures.norm_ratio = std::sqrt(ratio_or(sums.y_squares, sums.x_squares, 1.0, kInfinity));
  figures.max_abs = sums.max_abs;
  figures.max_abs_index = sums.max_abs_index;
  if (sums.limited > 0) {
    figures.clipped_percent =
        100.0 * static_cast<double>(sums.clipped) / static_cast<double>(sums.limited);
  }
  figures.flushed_percent = 100.0 * static_cast<double>(sums.flushed) / count;
  return figures;
}

void ErrorAccumulator::add(const ErrorSums& block) {
  ErrorSums carry = block;
  size_t level = 0;
  for (; (num_blocks_ >> level & 1) != 0; ++level) carry = merged(levels_[level], carry);
  if (level == levels_.size()) levels_.emplace_back();
  levels_[level] = carry;
  ++num_blocks_;
}

ErrorSums ErrorAccumulator::total() const {
  ErrorSums total;
  bool is_first = true;
  // Low levels hold the latest blocks.
  for (size_t level = 0; level < levels_.size(); ++level) {
    if ((num_blocks_ >> level & 1) == 0) continue;
    total = is_first ? levels_[level] : merged(levels_[level], total);
    is_first = false;
  }
  total.max_abs = std::max(total.max_abs, 0.0);
  return total;
}

bool is_float(DType dtype) {
  return dtype == DType::kF64 || dtype == DType::kF32 || dtype == DType::kF16 ||
         dtype == DType::kBF16;
}

void widen(const FloatRows& rows, int64_t first, std::span<double> out) {
  NF_ASSERT(is_float(rows.dtype));
  for (double& value : out) value = load(rows.dtype, rows.data, first++);
}

void add_errors(ErrorAccumulator& accumulator, const RowRange& range, const FloatRows& x,
                const FloatRows& y, const ClipLimits* limits) {
  std::vector<ErrorSums> row_sums(static_cast<size_t>(range.count));
  const int64_t grain = std::max<int64_t>(1, kRowGrainElements / std::max<int64_t>(1, range.cols));
  parallel_for(range.count, grain, [&](int64_t begin, int64_t end) {
    RowPiece piece;
    for (int64_t row = begin; row < end; ++row) {
      ErrorSums& sums = row_sums[static_cast<size_t>(row)];
      sums = sums_of_row(x, y, row, range.cols, limits, piece);
      sums.max_abs_index += (range.first + row) * range.cols;
    }
  });
  for (const ErrorSums& sums : row_sums) accumulator.add(sums);
}

uint64_t error_buffer_bytes(int64_t rows) {
  return static_cast<uint64_t>(rows) * sizeof(ErrorSums);
}

}  // namespace narrowfloat
