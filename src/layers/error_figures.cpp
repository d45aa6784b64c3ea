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

// Widens elements of the type Stored, at any address.
template <typename Stored, typename Widen>
void widen_each(const std::byte* from, std::span<double> out, Widen widen_one) {
  for (size_t i = 0; i < out.size(); ++i) {
    Stored stored{};
    std::memcpy(&stored, from + i * sizeof(Stored), sizeof(Stored));
    out[i] = static_cast<double>(widen_one(stored));
  }
}

// Element i of a row is summed in lane i % kLanes. A pair of lanes is what every vector unit has.
using Pair [[gnu::vector_size(16)]] = double;
constexpr Pair kNoPair = {0, 0};
constexpr Pair kOnes = {1, 1};
constexpr size_t kPairs = 2;
constexpr size_t kLanes = 2 * kPairs;

Pair pair_at(const double* elements) {
  Pair pair;
  std::memcpy(&pair, elements, sizeof(pair));
  return pair;
}

struct LaneSums {
  std::array<Pair, kPairs> error_squares{};
  std::array<Pair, kPairs> x_squares{};
  std::array<Pair, kPairs> y_squares{};
  std::array<Pair, kPairs> products{};

  // Adds two elements. An element that comes with a zero is alone.
  void add(size_t pair, Pair x, Pair y) {
    const Pair error = x - y;
    error_squares[pair] += error * error;
    x_squares[pair] += x * x;
    y_squares[pair] += y * y;
    products[pair] += x * y;
  }
  void add_one(size_t lane, double x, double y) {
    const bool is_second = lane % 2 != 0;
    add(lane / 2, is_second ? Pair{0, x} : Pair{x, 0}, is_second ? Pair{0, y} : Pair{y, 0});
  }
};

double sum_of(const std::array<Pair, kPairs>& pairs) {
  const Pair sums = pairs[0] + pairs[1];
  return sums[0] + sums[1];
}

// Elements of a row that are widened at a time, so that memory does not depend on the columns.
constexpr int64_t kPieceElements = 1 << 11;

struct RowPiece {
  std::array<double, kPieceElements> x;
  std::array<double, kPieceElements> y;
  std::array<double, kPieceElements>
      limits;  // One for each block; no block is larger than a piece.
};

// Elements [begin, end) that are beyond the limit of their block.
int64_t count_above(const RowPiece& piece, size_t begin, size_t end, size_t block) {
  const double limit = piece.limits[block];
  const Pair limits = {limit, limit};
  Pair counts{};
  for (; begin + 2 <= end; begin += 2) {
    const Pair x = pair_at(&piece.x[begin]);
    const Pair magnitudes = x < kNoPair ? -x : x;
    counts += magnitudes > limits ? kOnes : kNoPair;
  }
  const int64_t last = begin < end && std::abs(piece.x[begin]) > limit ? 1 : 0;
  return static_cast<int64_t>(counts[0] + counts[1]) + last;
}

// The same sums as add_piece() of finite elements only; false, and nothing is added, if some of
// them, or a square, is not finite.
bool add_finite_piece(ErrorSums& sums, LaneSums& lanes, const RowPiece& piece, int64_t first,
                      size_t size, size_t block_cols) {
  LaneSums added = lanes;
  std::array<Pair, kPairs> largest{};
  std::array<Pair, kPairs> flushed{};
  const size_t whole = size / kLanes * kLanes;
  for (size_t i = 0; i < whole; i += kLanes) {
    for (size_t pair = 0; pair < kPairs; ++pair) {
      const Pair x = pair_at(&piece.x[i + 2 * pair]);
      const Pair y = pair_at(&piece.y[i + 2 * pair]);
      added.add(pair, x, y);
    }
  }
  // Apart from the sums, which need most registers.
  for (size_t i = 0; i < whole; i += kLanes) {
    for (size_t pair = 0; pair < kPairs; ++pair) {
      const Pair x = pair_at(&piece.x[i + 2 * pair]);
      const Pair y = pair_at(&piece.y[i + 2 * pair]);
      const Pair error = x - y;
      largest[pair] = largest[pair] < error ? error : largest[pair];
      largest[pair] = largest[pair] < -error ? -error : largest[pair];
      const Pair of_zeros = y == kNoPair ? kOnes : kNoPair;
      flushed[pair] += x != kNoPair ? of_zeros : kNoPair;
    }
  }
  for (size_t i = whole; i < size; ++i) added.add_one(i % kLanes, piece.x[i], piece.y[i]);
  const bool is_finite = std::isfinite(sum_of(added.error_squares) + sum_of(added.x_squares) +
                                       sum_of(added.y_squares));
  if (!is_finite) return false;
  lanes = added;
  sums.flushed += static_cast<int64_t>(sum_of(flushed));
  for (size_t i = whole; i < size; ++i) sums.flushed += piece.x[i] != 0 && piece.y[i] == 0 ? 1 : 0;
  if (block_cols != 0) {
    sums.limited += static_cast<int64_t>(size);
    for (size_t begin = 0, block = 0; begin < size; begin += block_cols, ++block) {
      sums.clipped += count_above(piece, begin, std::min(size, begin + block_cols), block);
    }
  }
  double max_abs = 0;
  for (const Pair pair : largest) max_abs = std::max({max_abs, pair[0], pair[1]});
  for (size_t i = whole; i < size; ++i) {
    max_abs = std::max(max_abs, std::abs(piece.x[i] - piece.y[i]));
  }
  if (max_abs <= sums.max_abs) return true;
  size_t at = 0;
  while (std::abs(piece.x[at] - piece.y[at]) != max_abs) ++at;
  sums.max_abs = max_abs;
  sums.max_abs_index = first + static_cast<int64_t>(at);
  return true;
}

// Adds elements [first, first + count) of a row. block_cols: 0 where there are no limits.
void add_piece(ErrorSums& sums, LaneSums& lanes, const RowPiece& piece, int64_t first,
               int64_t count, int64_t block_cols) {
  const auto size = static_cast<size_t>(count);
  if (add_finite_piece(sums, lanes, piece, first, size, static_cast<size_t>(block_cols))) return;
  for (size_t i = 0; i < size; ++i) {
    const double x = piece.x[i];
    const double y = piece.y[i];
    if (!std::isfinite(x) || !std::isfinite(y)) {
      ++sums.nonfinite;
      continue;
    }
    const double error = x - y;
    lanes.add_one(i % kLanes, x, y);
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
  NF_ASSERT(step > 0 && (step % static_cast<int64_t>(kLanes) == 0 || step >= cols));
  LaneSums lanes;
  for (int64_t first = 0; first < cols; first += step) {
    const int64_t count = std::min(step, cols - first);
    const auto size = static_cast<size_t>(count);
    widen(x, row * cols + first, std::span(piece.x).first(size));
    widen(y, row * cols + first, std::span(piece.y).first(size));
    if (limits != nullptr) {
      const auto num_blocks = static_cast<size_t>(ceil_div(count, block_cols));
      limits->of_blocks(row, first / block_cols, std::span(piece.limits).first(num_blocks));
    }
    add_piece(sums, lanes, piece, first, count, block_cols);
  }
  sums.error_squares = sum_of(lanes.error_squares);
  sums.x_squares = sum_of(lanes.x_squares);
  sums.y_squares = sum_of(lanes.y_squares);
  sums.products = sum_of(lanes.products);
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
  const std::byte* const from = rows.data + first * bits(rows.dtype) / 8;
  switch (rows.dtype) {
    case DType::kF64:
      return widen_each<double>(from, out, [](double value) { return value; });
    case DType::kF32:
      return widen_each<float>(from, out, [](float value) { return value; });
    case DType::kF16:
      return widen_each<uint16_t>(from, out, [](uint16_t value) { return f16_to_float(value); });
    default:
      return widen_each<uint16_t>(from, out, [](uint16_t value) { return bf16_to_float(value); });
  }
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
