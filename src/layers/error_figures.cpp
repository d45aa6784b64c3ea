// See error_figures.h for the order of summation.
#include "layers/error_figures.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "base/assert.h"
#include "base/float_ops.h"
#include "base/int_math.h"
#include "formats/float16.h"
#include "runtime/parallel.h"
#include "runtime/vector_level.h"

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

// A pair of lanes is what every vector unit has.
using Pair [[gnu::vector_size(16)]] = double;
constexpr Pair kNoPair = {0, 0};
constexpr Pair kOnes = {1, 1};
constexpr auto kLanes = static_cast<size_t>(kErrorLanes);

Pair pair_at(const double* elements) {
  Pair pair;
  std::memcpy(&pair, elements, sizeof(pair));
  return pair;
}

double larger_of(Pair pair) { return std::max(pair[0], pair[1]); }

// The order of the sum is part of what figures are.
double sum_of(const double (&lanes)[kLanes]) {
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
         ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

bool is_finite(const ErrorLanes& lanes) {
  return std::isfinite(sum_of(lanes.error_squares) + sum_of(lanes.x_squares) +
                       sum_of(lanes.y_squares));
}

// Elements of a row that are widened at a time, so that memory does not depend on the columns.
constexpr int64_t kPieceElements = 1 << 11;

// The operands of some elements of a row, and buffers for what is computed of them.
struct RowPiece {
  std::array<double, kPieceElements> x;
  std::array<double, kPieceElements> y;
  // One for each block; no block is larger than a piece.
  std::array<double, kPieceElements> limits;
  std::array<float, kPieceElements> kernel_limits;
  size_t size = 0;
  size_t block_cols = 0;  // 0: there are no limits.
};

void add_one(ErrorLanes& lanes, size_t lane, double x, double y) {
  const double error = x - y;
  lanes.error_squares[lane] += error * error;
  lanes.x_squares[lane] += x * x;
  lanes.y_squares[lane] += y * y;
  lanes.products[lane] += x * y;
}

// Adds element i of a piece, which is finite.
void add_element(const RowPiece& piece, size_t i, ErrorLanes& lanes, PieceFigures& figures) {
  const double x = piece.x[i];
  const double y = piece.y[i];
  add_one(lanes, i % kLanes, x, y);
  figures.max_abs = std::max(figures.max_abs, std::abs(x - y));
  if (x != 0 && y == 0) ++figures.flushed;
  if (piece.block_cols != 0 && std::abs(x) > piece.limits[i / piece.block_cols]) ++figures.clipped;
}

// Adds the elements up to `count` of two lanes: four pairs of sums fit into registers.
void add_two_lanes(const RowPiece& piece, size_t lane, size_t count, ErrorLanes& lanes) {
  Pair error_squares = pair_at(&lanes.error_squares[lane]);
  Pair x_squares = pair_at(&lanes.x_squares[lane]);
  Pair y_squares = pair_at(&lanes.y_squares[lane]);
  Pair products = pair_at(&lanes.products[lane]);
  for (size_t i = lane; i < count; i += kLanes) {
    const Pair x = pair_at(&piece.x[i]);
    const Pair y = pair_at(&piece.y[i]);
    const Pair error = x - y;
    error_squares += error * error;
    x_squares += x * x;
    y_squares += y * y;
    products += x * y;
  }
  std::memcpy(&lanes.error_squares[lane], &error_squares, sizeof(Pair));
  std::memcpy(&lanes.x_squares[lane], &x_squares, sizeof(Pair));
  std::memcpy(&lanes.y_squares[lane], &y_squares, sizeof(Pair));
  std::memcpy(&lanes.products[lane], &products, sizeof(Pair));
}

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

// Does what kernels do, on all processors; `count` is a multiple of kLanes.
void add_lanes(const RowPiece& piece, size_t count, ErrorLanes& lanes, PieceFigures& figures) {
  for (size_t lane = 0; lane < kLanes; lane += 2) add_two_lanes(piece, lane, count, lanes);
  Pair largest{};
  Pair flushed{};
  for (size_t i = 0; i < count; i += 2) {
    const Pair x = pair_at(&piece.x[i]);
    const Pair y = pair_at(&piece.y[i]);
    const Pair error = x - y;
    largest = largest < error ? error : largest;
    largest = largest < -error ? -error : largest;
    const Pair of_zeros = y == kNoPair ? kOnes : kNoPair;
    flushed += x != kNoPair ? of_zeros : kNoPair;
  }
  figures.max_abs = std::max(figures.max_abs, larger_of(largest));
  figures.flushed += static_cast<int64_t>(flushed[0] + flushed[1]);
  if (piece.block_cols == 0) return;
  for (size_t begin = 0, block = 0; begin < count; begin += piece.block_cols, ++block) {
    figures.clipped += count_above(piece, begin, std::min(count, begin + piece.block_cols), block);
  }
}

// The largest fp32 number that is not above the limit: what is above one of them is above both.
float fp32_limit(double limit) {
  if (limit < 0) return -1;  // Every magnitude is above it.
  const auto rounded = static_cast<float>(limit);
  return static_cast<double>(rounded) > limit ? bits_float(float_bits(rounded) - 1) : rounded;
}

std::optional<ErrorOperand> kernel_operand(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return ErrorOperand::kF32;
    case DType::kBF16:
      return ErrorOperand::kBf16;
    case DType::kF16:
      return ErrorOperand::kF16;
    default:
      return std::nullopt;
  }
}

const std::byte* element_at(const FloatRows& rows, int64_t index) {
  return rows.data + index * bits(rows.dtype) / 8;
}

// Sums one row after another, in pieces.
class RowSummer {
 public:
  RowSummer(const FloatRows& x, const FloatRows& y, const ClipLimits* limits,
            const ErrorKernels* kernels)
      : x_(x), y_(y), limits_(limits) {
    const int64_t block_cols = limits != nullptr ? limits->block_cols : 0;
    piece_.block_cols = static_cast<size_t>(block_cols);
    if (limits != nullptr) step_ = kPieceElements / block_cols * block_cols;
    const std::optional<ErrorOperand> x_type = kernel_operand(x.dtype);
    const std::optional<ErrorOperand> y_type = kernel_operand(y.dtype);
    if (kernels == nullptr || !x_type || !y_type || block_cols % kErrorLanes != 0) return;
    kernel_ = kernels->add[static_cast<int>(*x_type)][static_cast<int>(*y_type)];
  }

  // The sums of a row but for max_abs_index.
  ErrorSums sums_of(int64_t row, int64_t cols) {
    NF_ASSERT(step_ > 0 && (step_ % kErrorLanes == 0 || step_ >= cols));
    ErrorSums sums;
    sums.elements = cols;
    sums.max_abs = -1;  // So that the first element counts.
    ErrorLanes lanes;
    for (int64_t first = 0; first < cols; first += step_) {
      begin_piece(row, first, std::min(step_, cols - first));
      const int64_t at = row * cols + first;
      if (!add_finite(at, sums, lanes)) add_each(at, sums, lanes);
    }
    sums.error_squares = sum_of(lanes.error_squares);
    sums.x_squares = sum_of(lanes.x_squares);
    sums.y_squares = sum_of(lanes.y_squares);
    sums.products = sum_of(lanes.products);
    return sums;
  }

  // The first column whose error has this magnitude, which one has.
  int64_t find(int64_t row, int64_t cols, double magnitude) {
    for (int64_t first = 0; first < cols; first += step_) {
      piece_.size = static_cast<size_t>(std::min(step_, cols - first));
      widen_from(row * cols + first, 0);
      for (size_t i = 0; i < piece_.size; ++i) {
        if (std::abs(piece_.x[i] - piece_.y[i]) == magnitude) {
          return first + static_cast<int64_t>(i);
        }
      }
    }
    NF_ASSERT(false);
    return 0;
  }

 private:
  void begin_piece(int64_t row, int64_t first, int64_t count) {
    piece_.size = static_cast<size_t>(count);
    if (limits_ == nullptr) return;
    const auto num_blocks = static_cast<size_t>(ceil_div(count, limits_->block_cols));
    const std::span<double> limits = std::span(piece_.limits).first(num_blocks);
    limits_->of_blocks(row, first / limits_->block_cols, limits);
    if (kernel_ == nullptr) return;
    std::transform(limits.begin(), limits.end(), piece_.kernel_limits.begin(), fp32_limit);
  }

  // Fills the buffers of the piece from its element i on; `at` is the piece's first element.
  void widen_from(int64_t at, size_t i) {
    const int64_t first = at + static_cast<int64_t>(i);
    widen(x_, first, std::span(piece_.x).first(piece_.size).subspan(i));
    widen(y_, first, std::span(piece_.y).first(piece_.size).subspan(i));
  }

  // Adds the piece; false, and nothing is added, if some elements, or a square, are not finite.
  bool add_finite(int64_t at, ErrorSums& sums, ErrorLanes& lanes) {
    ErrorLanes added = lanes;
    PieceFigures figures;
    const size_t whole = piece_.size / kLanes * kLanes;
    if (kernel_ != nullptr) {
      const bool has_limits = limits_ != nullptr;
      kernel_({.x = element_at(x_, at),
               .y = element_at(y_, at),
               .count = static_cast<int64_t>(whole),
               .limits = has_limits ? piece_.kernel_limits.data() : nullptr,
               .block_cols = static_cast<int64_t>(piece_.block_cols)},
              added, figures);
      widen_from(at, whole);
    } else {
      widen_from(at, 0);
      add_lanes(piece_, whole, added, figures);
    }
    for (size_t i = whole; i < piece_.size; ++i) add_element(piece_, i, added, figures);
    if (!is_finite(added)) return false;
    lanes = added;
    add_figures(figures, piece_.size, sums);
    return true;
  }

  // Adds the finite elements of the piece and counts the others.
  void add_each(int64_t at, ErrorSums& sums, ErrorLanes& lanes) {
    widen_from(at, 0);
    PieceFigures figures;
    size_t num_finite = 0;
    for (size_t i = 0; i < piece_.size; ++i) {
      if (!std::isfinite(piece_.x[i]) || !std::isfinite(piece_.y[i])) continue;
      add_element(piece_, i, lanes, figures);
      ++num_finite;
    }
    sums.nonfinite += static_cast<int64_t>(piece_.size - num_finite);
    if (num_finite > 0) add_figures(figures, num_finite, sums);
  }

  void add_figures(const PieceFigures& figures, size_t num_finite, ErrorSums& sums) const {
    sums.flushed += figures.flushed;
    sums.max_abs = std::max(sums.max_abs, figures.max_abs);
    if (limits_ == nullptr) return;
    sums.limited += static_cast<int64_t>(num_finite);
    sums.clipped += figures.clipped;
  }

  FloatRows x_;
  FloatRows y_;
  const ClipLimits* limits_;
  ErrorKernels::Add kernel_ = nullptr;
  int64_t step_ = kPieceElements;
  RowPiece piece_;
};

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

const ErrorKernels* fastest_error_kernels() {
#if defined(NARROWFLOAT_VECTOR_LEVELS)
  if (cpu_with(Device{}, VectorLevel::kAvx512).ok()) return &kErrorKernelsAvx512;
  if (cpu_with(Device{}, VectorLevel::kAvx2).ok()) return &kErrorKernelsAvx2;
#endif
  return nullptr;
}

void add_errors(ErrorAccumulator& accumulator, const RowRange& range, const FloatRows& x,
                const FloatRows& y, const ClipLimits* limits, const ErrorKernels* kernels) {
  std::vector<ErrorSums> row_sums(static_cast<size_t>(range.count));
  parallel_for(range.count, row_grain(kRowGrainElements, range.cols),
               [&](int64_t begin, int64_t end) {
                 RowSummer summer(x, y, limits, kernels);
                 for (int64_t row = begin; row < end; ++row) {
                   row_sums[static_cast<size_t>(row)] = summer.sums_of(row, range.cols);
                 }
               });
  // Only the largest error of all rows needs its place.
  const auto worst = std::max_element(
      row_sums.begin(), row_sums.end(),
      [](const ErrorSums& a, const ErrorSums& b) { return a.max_abs < b.max_abs; });
  if (worst != row_sums.end() && worst->max_abs >= 0) {
    const int64_t row = worst - row_sums.begin();
    const int64_t col = RowSummer(x, y, limits, kernels).find(row, range.cols, worst->max_abs);
    worst->max_abs_index = (range.first + row) * range.cols + col;
  }
  for (const ErrorSums& sums : row_sums) accumulator.add(sums);
}

uint64_t error_buffer_bytes(int64_t rows) {
  return static_cast<uint64_t>(rows) * sizeof(ErrorSums);
}

}  // namespace narrowfloat
