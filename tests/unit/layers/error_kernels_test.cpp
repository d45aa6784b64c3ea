// The kernels of each level of vector instructions give the sums of the portable loop.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "formats/float16.h"
#include "layers/error_figures.h"
#include "runtime/vector_level.h"

namespace narrowfloat {
namespace {

// Elements at an odd address: multiples of 1/16, zeros among them, and where wanted infinities.
std::vector<std::byte> element_bytes(DType dtype, uint32_t seed, int64_t count,
                                     bool has_infinities) {
  const auto size = static_cast<size_t>(bits(dtype) / 8);
  std::vector<std::byte> out(1 + static_cast<size_t>(count) * size);
  std::mt19937 random(seed);
  for (int64_t i = 0; i < count; ++i) {
    auto value = static_cast<double>(static_cast<int>(random() % 17) - 8) / 16;
    if (random() % 3 != 0) value *= 1 + static_cast<double>(random() % 128) / 128;
    if (has_infinities && i % 97 == 50) value = std::numeric_limits<double>::infinity();
    const auto single = static_cast<float>(value);
    const uint16_t half = dtype == DType::kF16 ? float_to_f16(single) : float_to_bf16(single);
    const void* source = dtype == DType::kF64   ? static_cast<const void*>(&value)
                         : dtype == DType::kF32 ? static_cast<const void*>(&single)
                                                : static_cast<const void*>(&half);
    std::memcpy(&out[1 + static_cast<size_t>(i) * size], source, size);
  }
  return out;
}

class ErrorKernelsTest : public ::testing::TestWithParam<VectorLevel> {};

// All bits of the sums: both types at odd addresses, rows that end within a step of the kernels,
// limits that round up to the magnitudes in fp32, errors of equal size, elements of no number.
TEST_P(ErrorKernelsTest, GiveTheBitsOfThePortableLoop) {
  const Support support = cpu_with(Device{}, GetParam());
  if (!support.ok()) GTEST_SKIP() << support.reason();
  const ErrorKernels& kernels =
      GetParam() == VectorLevel::kAvx2 ? kErrorKernelsAvx2 : kErrorKernelsAvx512;
  constexpr int64_t kRows = 7;
  const DType dtypes[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kF64};
  int64_t clipped = 0;
  int64_t flushed = 0;
  for (const int64_t cols : {1, 15, 16, 133, 2048, 4102}) {
    for (int64_t i = 0; i < 32; ++i) {
      const DType x_type = dtypes[i % 4];
      const DType y_type = dtypes[i / 4 % 4];
      const std::vector<std::byte> x = element_bytes(x_type, 1, kRows * cols, i >= 16);
      const std::vector<std::byte> y = element_bytes(y_type, 2, kRows * cols, i >= 16);
      const ClipLimits limits = {
          .block_cols = 16 << i % 3,
          .of_blocks = [](int64_t row, int64_t first, std::span<double> out) {
            for (double& limit : out)
              limit = std::nextafter(static_cast<double>((row + first++) % 9 - 1) / 16, 0);
          }};
      const auto sums_with = [&](const ErrorKernels* used) {
        ErrorAccumulator errors;
        add_errors(errors, {5, kRows, cols}, {x_type, &x[1]}, {y_type, &y[1]},
                   i % 5 == 0 ? nullptr : &limits, used);
        return errors.total();
      };
      const ErrorSums sums = sums_with(&kernels);
      const ErrorSums wanted = sums_with(nullptr);
      EXPECT_EQ(sums.nonfinite, wanted.nonfinite);
      EXPECT_EQ(sums.limited, wanted.limited);
      EXPECT_EQ(sums.clipped, wanted.clipped);
      EXPECT_EQ(sums.flushed, wanted.flushed);
      EXPECT_EQ(sums.error_squares, wanted.error_squares);
      EXPECT_EQ(sums.x_squares, wanted.x_squares);
      EXPECT_EQ(sums.y_squares, wanted.y_squares);
      EXPECT_EQ(sums.products, wanted.products);
      EXPECT_EQ(sums.max_abs, wanted.max_abs);
      EXPECT_EQ(sums.max_abs_index, wanted.max_abs_index);
      EXPECT_EQ(sums.nonfinite > 0, i >= 16 && kRows * cols > 50);
      clipped += sums.clipped;
      flushed += sums.flushed;
    }
  }
  EXPECT_GT(clipped, 0);
  EXPECT_GT(flushed, 0);
}

INSTANTIATE_TEST_SUITE_P(All, ErrorKernelsTest,
                         ::testing::Values(VectorLevel::kAvx2, VectorLevel::kAvx512),
                         [](const auto& test) {
                           return test.param == VectorLevel::kAvx2 ? "avx2" : "avx512";
                         });

}  // namespace
}  // namespace narrowfloat
