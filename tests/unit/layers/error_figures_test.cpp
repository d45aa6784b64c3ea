// Figures against direct computation, and their independence of threads and ranges.
#include "layers/error_figures.h"

#include <cmath>
#include <limits>

#include "narrowfloat/runtime.h"
#include "unit/layers/model_files.h"

namespace narrowfloat {
namespace {

constexpr double kDoubleInfinity = std::numeric_limits<double>::infinity();

FloatRows f32_rows(const std::vector<float>& values) {
  return {DType::kF32, std::as_bytes(std::span(values)).data()};
}

ErrorFigures compare(const std::vector<float>& x, const std::vector<float>& y, int64_t cols) {
  ErrorAccumulator errors;
  add_errors(errors, {0, static_cast<int64_t>(x.size()) / cols, cols}, f32_rows(x), f32_rows(y),
             nullptr);
  return figures_of(errors.total());
}

TEST(ErrorFigures, EqualsDirectComputation) {
  const std::vector<float> x = {3, -4, 0, 1};
  const std::vector<float> y = {2, -4, 0.5F, 0};
  const ErrorFigures figures = compare(x, y, 2);
  EXPECT_EQ(figures.elements, 4);
  EXPECT_DOUBLE_EQ(figures.mse, 2.25 / 4);
  EXPECT_DOUBLE_EQ(figures.relative_error, std::sqrt(2.25 / 26));
  EXPECT_DOUBLE_EQ(figures.sqnr_db, -20 * std::log10(std::sqrt(2.25 / 26)));
  EXPECT_DOUBLE_EQ(figures.cosine, 22 / std::sqrt(26 * 20.25));
  EXPECT_DOUBLE_EQ(figures.norm_ratio, std::sqrt(20.25 / 26));
  EXPECT_EQ(figures.max_abs, 1);
  EXPECT_EQ(figures.max_abs_index, 0);  // Element 3 is as far off, but later.
  EXPECT_EQ(figures.flushed_percent, 25);
  EXPECT_FALSE(figures.clipped_percent.has_value());
}

TEST(ErrorFigures, ClippingIsJudgedPerBlock) {
  const std::vector<float> x = {1, 2, 3, -4};
  const ClipLimits limits = {.block_cols = 2,
                             .of_blocks = [](int64_t, int64_t first, std::span<double> out) {
                               for (double& limit : out) limit = first++ == 0 ? 1.5 : 4;
                             }};
  ErrorAccumulator errors;
  add_errors(errors, {0, 1, 4}, f32_rows(x), f32_rows(x), &limits);
  EXPECT_EQ(figures_of(errors.total()).clipped_percent, 25);
}

// Long rows are worked on in pieces, which must not show: the sums are those of one loop.
TEST(ErrorFigures, RowsOfAnyLengthAreSummedInOrder) {
  constexpr int64_t kCols = 5 * 1000;
  constexpr int64_t kBlock = 48;
  const std::vector<float> x = weight_values("x", 2 * kCols);
  const std::vector<float> y = weight_values("y", 2 * kCols);
  const auto limit = [](int64_t row, int64_t block) {
    return static_cast<double>((7 * block + row) % 5) / 4;
  };
  const ClipLimits limits = {.block_cols = kBlock,
                             .of_blocks = [&](int64_t row, int64_t first, std::span<double> out) {
                               for (double& entry : out) entry = limit(row, first++);
                             }};
  ErrorAccumulator errors;
  add_errors(errors, {0, 2, kCols}, f32_rows(x), f32_rows(y), &limits);
  const ErrorSums sums = errors.total();
  double squares[2][8] = {};  // Eight alternating lanes.
  int64_t clipped = 0;
  int64_t worst = 0;
  const auto error = [&](int64_t i) {
    return static_cast<double>(x[static_cast<size_t>(i)]) -
           static_cast<double>(y[static_cast<size_t>(i)]);
  };
  for (int64_t i = 0; i < 2 * kCols; ++i) {
    squares[i / kCols][i % kCols % 8] += error(i) * error(i);
    const double magnitude = std::abs(static_cast<double>(x[static_cast<size_t>(i)]));
    if (magnitude > limit(i / kCols, i % kCols / kBlock)) ++clipped;
    if (std::abs(error(i)) > std::abs(error(worst))) worst = i;
  }
  const auto total = [](const double* lane) {
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) +
           ((lane[1] + lane[5]) + (lane[3] + lane[7]));
  };
  EXPECT_EQ(sums.error_squares, total(squares[0]) + total(squares[1]));
  EXPECT_EQ(sums.clipped, clipped);
  EXPECT_GT(clipped, 0);
  EXPECT_EQ(sums.limited, 2 * kCols);
  EXPECT_EQ(sums.max_abs_index, worst);
}

TEST(ErrorFigures, NothingLeftToCompareIsNoPerfectScore) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const ErrorFigures lost = compare({1, 2}, {kInfinity, -kInfinity}, 2);
  EXPECT_EQ(lost.nonfinite, 2);
  for (const double figure : {lost.mse, lost.sqnr_db, lost.cosine, lost.norm_ratio}) {
    EXPECT_TRUE(std::isnan(figure));
  }
}

TEST(ErrorFigures, ZeroTensorsHaveTheirConventions) {
  const ErrorFigures same = compare({0, 0}, {0, 0}, 2);
  EXPECT_EQ(same.relative_error, 0);
  EXPECT_EQ(same.sqnr_db, kDoubleInfinity);
  EXPECT_EQ(same.cosine, 1);
  EXPECT_EQ(same.norm_ratio, 1);
  const ErrorFigures other = compare({0, 0}, {1, 0}, 2);
  EXPECT_EQ(other.relative_error, kDoubleInfinity);
  EXPECT_EQ(other.sqnr_db, -kDoubleInfinity);
  EXPECT_EQ(other.cosine, 0);
}

TEST(ErrorFigures, NonFiniteElementsAreCountedAndLeftOut) {
  const auto infinity = std::numeric_limits<float>::infinity();
  const ErrorFigures figures = compare({1, NAN, infinity, 2}, {1, 1, infinity, 3}, 4);
  EXPECT_EQ(figures.elements, 4);
  EXPECT_EQ(figures.nonfinite, 2);
  EXPECT_DOUBLE_EQ(figures.mse, 0.5);
}

TEST(ErrorFigures, DoNotDependOnThreadsOrRanges) {
  constexpr int64_t kRows = 700;
  constexpr int64_t kCols = 96;
  const std::vector<float> x = weight_values("x", kRows * kCols);
  const std::vector<float> y = weight_values("y", kRows * kCols);
  const ErrorFigures whole = compare(x, y, kCols);
  set_num_threads(1);
  ErrorAccumulator errors;
  for (int64_t first = 0; first < kRows; first += 128) {
    const int64_t count = std::min<int64_t>(128, kRows - first);
    const std::vector<float> x_part(x.begin() + first * kCols, x.begin() + (first + count) * kCols);
    const std::vector<float> y_part(y.begin() + first * kCols, y.begin() + (first + count) * kCols);
    add_errors(errors, {first, count, kCols}, f32_rows(x_part), f32_rows(y_part), nullptr);
  }
  set_num_threads(0);
  const ErrorFigures pieces = figures_of(errors.total());
  EXPECT_EQ(whole.mse, pieces.mse);
  EXPECT_EQ(whole.sqnr_db, pieces.sqnr_db);
  EXPECT_EQ(whole.cosine, pieces.cosine);
  EXPECT_EQ(whole.max_abs_index, pieces.max_abs_index);
}

TEST(ErrorFigures, ReadsAllFloatTypesAtOddAddresses) {
  const std::vector<double> wanted = {1.5, -2};
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    std::vector<std::byte> bytes(1 + 2 * sizeof(double));
    for (size_t i = 0; i < wanted.size(); ++i) {
      const double value = wanted[i];
      const auto single = static_cast<float>(value);
      const uint16_t half = dtype == DType::kF16 ? float_to_f16(single) : float_to_bf16(single);
      const auto size = static_cast<size_t>(bits(dtype) / 8);
      const void* source = dtype == DType::kF64   ? static_cast<const void*>(&value)
                           : dtype == DType::kF32 ? static_cast<const void*>(&single)
                                                  : static_cast<const void*>(&half);
      std::memcpy(&bytes[1 + i * size], source, size);
    }
    std::vector<double> row(2);
    widen({dtype, &bytes[1]}, 0, row);
    EXPECT_EQ(row, wanted) << name(dtype);
    widen({dtype, &bytes[1]}, 1, std::span(row).first(1));
    EXPECT_EQ(row[0], wanted[1]) << name(dtype);
  }
}

}  // namespace
}  // namespace narrowfloat
