// Counting elements and block scales that are not finite.
#include "layers/nonfinite.h"

#include <array>
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

namespace narrowfloat {
namespace {

TEST(Nonfinite, CountsNanAndInfinitiesOfBothSigns) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::array<float, 6> f32 = {1, kInfinity, -kInfinity, NAN, -0.0F, 3e38F};
  EXPECT_EQ(count_nonfinite(TensorView::contiguous(f32.data(), DType::kF32, {2, 3})), 3);
  EXPECT_EQ(first_nonfinite(TensorView::contiguous(f32.data(), DType::kF32, {2, 3})), 1);
  const std::array<uint16_t, 4> bf16 = {0x7F80, 0xFFC0, 0x7F7F, 0x7C00};
  EXPECT_EQ(count_nonfinite(TensorView::contiguous(bf16.data(), DType::kBF16, {1, 4})), 2);
  const std::array<uint16_t, 4> f16 = {0x7C00, 0xFE00, 0x7BFF, 0};
  EXPECT_EQ(count_nonfinite(TensorView::contiguous(f16.data(), DType::kF16, {1, 4})), 2);
}

TEST(Nonfinite, KnowsBadScalesOfEveryType) {
  const std::array<uint8_t, 6> codes = {0x7F, 0xFF, 0x80, 0x81, 0xFE, 0x38};
  const BadScales e4m3 = bad_scales(ScaleType::kE4M3, std::as_bytes(std::span(codes)));
  EXPECT_EQ(e4m3.nonfinite, 2);
  EXPECT_EQ(e4m3.negative, 2);
  const BadScales ue8m0 = bad_scales(ScaleType::kUE8M0, std::as_bytes(std::span(codes)));
  EXPECT_EQ(ue8m0.nonfinite, 1);
  EXPECT_EQ(ue8m0.negative, 0);
  const std::array<float, 4> floats = {1, -1, -0.0F, NAN};
  const BadScales f32 = bad_scales(ScaleType::kF32, std::as_bytes(std::span(floats)));
  EXPECT_EQ(f32.nonfinite, 1);
  EXPECT_EQ(f32.negative, 1);
}

}  // namespace
}  // namespace narrowfloat
