// tensor_amax() and row_amax() on a GPU where conformance does not reach: rows of several pieces,
// pieces of every number of threads, maxima at every place, more than 2^31 elements.
#include <algorithm>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "cuda/gpu_test.h"
#include "cuda/random_bytes.h"
#include "narrowfloat/quantize.h"
#include "support/device_buffer.h"
#include "support/device_copies.h"
#include "support/tensors.h"

namespace narrowfloat::testing {
namespace {

class AmaxCuda : public GpuTestWith<DType> {};

struct Bits {
  int64_t width;
  uint32_t nan;
  uint32_t infinity;
  uint32_t denormal;
};

Bits bits_of(DType dtype) {
  if (dtype == DType::kF32) return {4, 0xFF800001U, 0x7F800000U, 1};
  return {2, dtype == DType::kF16 ? 0xFC01U : 0xFF81U, dtype == DType::kF16 ? 0x7C00U : 0x7F80U, 1};
}

std::vector<uint32_t> on_gpu(const Matrix& input, bool per_row, int64_t alignment) {
  const Vector output(DType::kF32, per_row ? input.num_rows() : 1);
  const DeviceCopies copies({&input.buffer(), &output.buffer()},
                            {.alignment = alignment, .programmatic_launch = true});
  const TensorView from = copies.view(input.view());
  const TensorView to = copies.view(output.view());
  per_row ? row_amax(from, to, copies.stream()) : tensor_amax(from, to, copies.stream());
  EXPECT_TRUE(copies.take_back()) << "a canary was overwritten";
  const auto bits = output.buffer().span<uint32_t>();
  return {bits.begin(), bits.end()};
}

std::vector<uint32_t> on_cpu(const Matrix& input, bool per_row) {
  const Vector output(DType::kF32, per_row ? input.num_rows() : 1);
  per_row ? row_amax(input.view(), output.view()) : tensor_amax(input.view(), output.view());
  const auto bits = output.buffer().span<uint32_t>();
  return {bits.begin(), bits.end()};
}

TEST_P(AmaxCuda, LargeAndOddShapesEqualTheCpu) {
  Random random(static_cast<uint64_t>(GetParam()));
  for (int trial = 0; trial < 60 && !HasFailure(); ++trial) {
    const int64_t cols = random.pick<int64_t>(
        {1, 3, 17, 100, 513, 2880, 7168, random.range(20000, 70000), random.range(100000, 700000)});
    const MatrixShape shape{.dtype = GetParam(),
                            .rows = std::max<int64_t>(1, random.range(1, 4000000) / cols),
                            .cols = cols,
                            .gap = random.chance(40) ? random.range(1, 9) : 0};
    const Matrix input(shape, {.misalignment = bits_of(GetParam()).width * random.range(0, 15)});
    random_bytes(input.buffer().span(), static_cast<uint64_t>(trial));
    for (const bool per_row : {false, true}) {
      EXPECT_EQ(on_cpu(input, per_row), on_gpu(input, per_row, bits_of(GetParam()).width))
          << fmt::format("trial {}: {}x{} gap {} {}", trial, shape.rows, cols, shape.gap,
                         per_row ? "rows" : "tensor");
    }
  }
}

// Between NaNs, which never count: a lone number at each place around the pieces' ends.
TEST_P(AmaxCuda, FindsALoneNumberAmongNans) {
  const Bits bits = bits_of(GetParam());
  for (const int64_t cols : {int64_t{40}, int64_t{3000}, 100003 / bits.width}) {
    const Matrix input({.dtype = GetParam(), .rows = 2, .cols = cols},
                       {.misalignment = bits.width});
    const auto set = [&](int64_t col, uint32_t value) {
      store_element(GetParam(), value, col, input.row(1));
    };
    for (int64_t row = 0; row < 2; ++row) {
      for (int64_t col = 0; col < cols; ++col) {
        store_element(GetParam(), bits.nan, col, input.row(row));
      }
    }
    EXPECT_EQ(on_gpu(input, true, bits.width), (std::vector<uint32_t>{0, 0}));
    const int64_t piece = 4096 / bits.width;
    for (const int64_t col : {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{8}, piece - 1, piece,
                              piece + 1, cols - 9, cols - 8, cols - 1}) {
      if (col < 0 || col >= cols) continue;
      for (const uint32_t value : {bits.denormal, bits.infinity}) {
        set(col, value);
        for (const bool per_row : {false, true}) {
          EXPECT_EQ(on_cpu(input, per_row), on_gpu(input, per_row, bits.width))
              << cols << " " << col;
        }
      }
      set(col, bits.nan);
    }
  }
}

TEST_P(AmaxCuda, MoreThanTwoToThe31Elements) {
  constexpr int64_t kCols = 70000;
  constexpr int64_t kRows = (int64_t{1} << 31) / kCols + 300;
  const Bits bits = bits_of(GetParam());
  const int64_t needed_gib = 2 * bits.width + 1;
  if (free_device_memory() < needed_gib << 30) {
    GTEST_SKIP() << "skipped: needs " << needed_gib << " GiB of memory";
  }
  const DeviceBuffer input(kRows * kCols * bits.width, {.poison = 0});
  const DeviceBuffer output(kRows * 4);
  const auto from = TensorView::contiguous(input.data(), GetParam(), {kRows, kCols}, gpu());
  const auto maxima = [&](bool per_row) {
    const auto to =
        TensorView::contiguous(output.data(), DType::kF32, {per_row ? kRows : 1}, gpu());
    per_row ? row_amax(from, to) : tensor_amax(from, to);
    std::vector<float> values(static_cast<size_t>(per_row ? kRows : 1));
    output.read(values.data(), static_cast<int64_t>(values.size()) * 4);
    return values;
  };
  EXPECT_EQ(maxima(false), std::vector<float>{0.0F});
  float value = 1.0F;
  for (const int64_t row : {int64_t{0}, (int64_t{1} << 31) / kCols + 1, kRows - 1}) {
    value *= -2.0F;
    const uint32_t stored = element_bits(GetParam(), value);
    input.write(&stored, bits.width, (row * kCols + kCols - 1) * bits.width);
    EXPECT_EQ(maxima(false), std::vector<float>{std::abs(value)}) << row;
    EXPECT_EQ(maxima(true)[static_cast<size_t>(row)], std::abs(value)) << row;
  }
}

INSTANTIATE_TEST_SUITE_P(All, AmaxCuda, ::testing::Values(DType::kF32, DType::kF16, DType::kBF16),
                         [](const auto& test) { return std::string(name(test.param)); });

}  // namespace
}  // namespace narrowfloat::testing
