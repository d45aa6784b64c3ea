// The factor of a damped Hessian, multiplied out again.
#include "layers/hessian_factor.h"

#include <algorithm>

#include <gtest/gtest.h>

#include "narrowfloat/error.h"

namespace narrowfloat {
namespace {

constexpr int64_t kCols = 70;  // More than two bands of rows.

// A symmetric matrix with a heavy diagonal, whose columns 3 and 4 weigh alike, and 5 nothing.
std::vector<float> test_hessian() {
  std::vector<float> hessian(kCols * kCols);
  const auto at = [&](int64_t row, int64_t col) -> float& {
    return hessian[static_cast<size_t>(row * kCols + col)];
  };
  for (int64_t row = 0; row < kCols; ++row) {
    for (int64_t col = 0; col < row; ++col) {
      const auto value = static_cast<float>((row * 31 + col * 17) % 13 - 6) / 16;
      at(row, col) = at(col, row) = row == 5 || col == 5 ? 0.0F : value;
    }
    at(row, row) = row == 4 ? at(3, 3) : row == 5 ? 0.0F : static_cast<float>(20 + row * 7 % 11);
  }
  return hessian;
}

HessianFactor factor_of(const std::vector<float>& hessian) {
  std::vector<float> diagonal(kCols);
  for (size_t col = 0; col < kCols; ++col) diagonal[col] = hessian[col * kCols + col];
  const auto load_row = [&](int64_t row, std::span<float> values) {
    std::copy_n(hessian.begin() + row * kCols, kCols, values.begin());
  };
  return {diagonal, load_row, "the Hessian"};
}

TEST(HessianFactor, MultipliesToTheDampedHessian) {
  const std::vector<float> hessian = test_hessian();
  const HessianFactor factor = factor_of(hessian);
  double sum = 0;
  for (size_t col = 0; col < kCols; ++col) sum += static_cast<double>(hessian[col * kCols + col]);
  const double damping = 0.01 * sum / kCols;
  for (int64_t a = 0; a < kCols; ++a) {
    for (int64_t b = 0; b <= a; ++b) {
      double product = 0;
      for (int64_t step = a; step < kCols; ++step) {
        const std::span<const double> row = factor.row(step);
        product += row[static_cast<size_t>(a)] * row[static_cast<size_t>(b)];
      }
      const auto row = static_cast<size_t>(factor.order()[static_cast<size_t>(a)]);
      const auto col = static_cast<size_t>(factor.order()[static_cast<size_t>(b)]);
      const auto expected = static_cast<double>(hessian[row * kCols + col]);
      EXPECT_NEAR(product, expected + (a == b ? damping : 0), 1e-12) << a << ", " << b;
    }
  }
}

TEST(HessianFactor, TakesColumnsByFallingDiagonalThenByNumber) {
  const std::vector<float> hessian = test_hessian();
  const HessianFactor factor = factor_of(hessian);
  const auto weight = [&](int64_t col) { return hessian[static_cast<size_t>(col * (kCols + 1))]; };
  for (size_t step = 1; step < kCols; ++step) {
    const int64_t before = factor.order()[step - 1];
    const int64_t now = factor.order()[step];
    EXPECT_TRUE(weight(before) > weight(now) || (weight(before) == weight(now) && before < now));
  }
}

TEST(HessianFactor, OfZerosIsTheIdentity) {
  const HessianFactor factor = factor_of(std::vector<float>(kCols * kCols));
  for (int64_t step = 0; step < kCols; ++step) {
    EXPECT_EQ(factor.order()[static_cast<size_t>(step)], step);
    const std::span<const double> row = factor.row(step);
    EXPECT_EQ(row.back(), 1);
    EXPECT_TRUE(std::all_of(row.begin(), row.end() - 1, [](double x) { return x == 0; })) << step;
  }
}

TEST(HessianFactor, RefusesWhatIsNotPositiveDefinite) {
  std::vector<float> hessian = test_hessian();
  hessian[2 * kCols + 1] = hessian[kCols + 2] = 100;
  try {
    (void)factor_of(hessian);
    FAIL() << "it was factored";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kCorruptData);
    EXPECT_NE(std::string(error.what()).find("the Hessian is not positive definite at column"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace narrowfloat
