// Group quantization by hand, and every check at its door.
#include "narrowfloat/group_quantize.h"

#include <array>

#include <gtest/gtest.h>

#include "support/expect_error.h"
#include "support/special_floats.h"

namespace narrowfloat::testing {
namespace {

// Two rows of two groups of four.
struct GroupCall {
  std::array<float, 16> input{};
  std::array<uint8_t, 16> values{};
  std::array<float, 8> scales{};
  GroupQuantizeOptions options{.group_size = 4};

  [[nodiscard]] TensorView in() const {
    return TensorView::contiguous(input.data(), DType::kF32, {2, 8});
  }
  [[nodiscard]] TensorView codes(DType dtype) const {
    return TensorView::contiguous(values.data(), dtype, {2, 8});
  }
  [[nodiscard]] TensorView factors(int64_t first, int64_t second) const {
    return TensorView::contiguous(scales.data(), DType::kF32, {first, second});
  }
};

TEST(GroupQuantize, Int8RoundsHalvesUpAndNanToZero) {
  // A maximum of 127 makes the scale 1.
  GroupCall call{.input = {127, 0.5F, -0.5F, 1.5F, -127, -1.5F, kFloatNan, -126.5F}};
  quantize_group_8bit(call.in(), call.codes(DType::kI8), call.factors(2, 2), call.options);
  const std::array<int, 8> expected{127, 1, 0, 2, -127, -1, 0, -126};
  for (size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(expected[i], static_cast<int8_t>(call.values[i])) << i;
  }
  EXPECT_EQ(call.scales[0], 1.0F);
  EXPECT_EQ(call.scales[2], 1e-10F / 127.0F);
}

TEST(GroupQuantize, ColumnMajorPowersOfTwoAreStoredAsF32) {
  // 896 / 448 = 2 exactly; 900 / 448 is a little more, so 4; zeros have 2^-33.
  GroupCall call{.input = {896, 1, -448, 0, 900, 0, 0, -0.0F}};
  call.options.scale_order = GroupScaleOrder::kColumnMajorAligned;
  call.options.power_of_two_scales = true;
  call.scales.fill(7.0F);
  quantize_group_8bit(call.in(), call.codes(DType::kF8E4M3), call.factors(2, 4), call.options);
  const std::array<float, 8> expected{2, 0x1p-33F, 0, 0, 4, 0x1p-33F, 0, 0};
  EXPECT_EQ(expected, call.scales);
  // 448, 0.5, -224, 0; 225 is nearer to 224 (0x76) than to 240; the sign of zero stays.
  const std::array<uint8_t, 8> codes{0x7E, 0x30, 0xF6, 0, 0x76, 0, 0, 0x80};
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(codes[i], call.values[i]) << i;
}

TEST(GroupQuantize, E5m2ReachesItsLargest) {
  GroupCall call{.input = {57344, -1, kFloatNan, 0x1p-17F}};
  quantize_group_8bit(call.in(), call.codes(DType::kF8E5M2), call.factors(2, 2), call.options);
  const std::array<uint8_t, 4> codes{0x7B, 0xBC, 0x7F, 0x00};
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(codes[i], call.values[i]) << i;
}

TEST(GroupQuantize, RefusesWhatCannotWork) {
  GroupCall call;
  const auto refused = [&](const std::vector<std::string>& words, const TensorView& values,
                           const TensorView& scales, const GroupQuantizeOptions& options) {
    const GroupCall before = call;
    expect_error(kInvalid, words, [&] { quantize_group_8bit(call.in(), values, scales, options); });
    EXPECT_EQ(before.values, call.values);
    EXPECT_EQ(before.scales, call.scales);
  };
  const TensorView codes = call.codes(DType::kF8E4M3);
  const TensorView factors = call.factors(2, 2);
  refused({"group_size", "divisor of the 8", "3"}, codes, factors, {.group_size = 3});
  refused({"group_size", "0"}, codes, factors, {.group_size = 0});
  refused({"eps", "2^-100", "0"}, codes, factors, {.group_size = 4, .eps = 0.0F});
  refused({"power_of_two_scales", "column-major"}, codes, factors,
          {.group_size = 4, .power_of_two_scales = true});
  refused({"values", "F8_E4M3 or F8_E5M2 or I8", "U8"}, call.codes(DType::kU8), factors,
          call.options);
  refused({"scales", "[2, 2]", "F32[4, 1]"}, codes, call.factors(4, 1), call.options);
  refused({"scales", "[2, 4]", "F32[2, 2]"}, codes, factors,
          {.group_size = 4, .scale_order = GroupScaleOrder::kColumnMajorAligned});
  refused({"scale_order", "9"}, codes, factors,
          {.group_size = 4, .scale_order = static_cast<GroupScaleOrder>(9)});
  refused({"values", "F32[2, 8]"}, TensorView::contiguous(call.values.data(), DType::kI8, {4, 4}),
          factors, call.options);
  const TensorView cube = TensorView::contiguous(call.input.data(), DType::kF32, {2, 1, 8});
  expect_error(kInvalid, {"input", "column-major"}, [&] {
    quantize_group_8bit(cube, TensorView::contiguous(call.values.data(), DType::kI8, {2, 1, 8}),
                        factors, {.group_size = 4, .scale_order = GroupScaleOrder::kColumnMajor});
  });
}

}  // namespace
}  // namespace narrowfloat::testing
