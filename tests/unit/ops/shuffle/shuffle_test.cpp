// Row shuffles by hand, there and back, and every check at their door.
#include "narrowfloat/shuffle.h"

#include <array>
#include <numeric>

#include <gtest/gtest.h>

#include "narrowfloat/quantize.h"
#include "ops/shuffle/shuffle_problem.h"
#include "support/expect_error.h"

namespace narrowfloat::testing {
namespace {

template <size_t kRows>
std::array<uint8_t, kRows> shuffled(int64_t tile) {
  std::array<uint8_t, kRows> rows;
  std::iota(rows.begin(), rows.end(), uint8_t{0});
  std::array<uint8_t, kRows> out{};
  shuffle_rows(TensorView::contiguous(rows.data(), DType::kU8, {kRows, 1}),
               TensorView::contiguous(out.data(), DType::kU8, {kRows, 1}), tile);
  return out;
}

TEST(ShuffleRows, PutsEverySecondRowOfSixteenFirst) {
  const std::array<uint8_t, 16> expected{0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15};
  EXPECT_EQ(expected, shuffled<16>(64));
}

TEST(ShuffleRows, PutsEveryFourthRowOfThirtyTwoFirst) {
  const std::array<uint8_t, 32> expected{0,  4,  8,  12, 16, 20, 24, 28, 1,  5,  9,
                                         13, 17, 21, 25, 29, 2,  6,  10, 14, 18, 22,
                                         26, 30, 3,  7,  11, 15, 19, 23, 27, 31};
  EXPECT_EQ(expected, shuffled<32>(128));
}

TEST(ShuffleRows, IsAPermutationWithAnInverse) {
  for (const int64_t group : {16, 32}) {
    for (int64_t row = 0; row < 3 * group; ++row) {
      EXPECT_EQ(row, plain_row(shuffled_row(row, group), group));
      EXPECT_EQ(row / group, shuffled_row(row, group) / group);
    }
  }
}

TEST(ShuffleRows, OfScalesAreThoseOfTheLinearMatrixSwizzled) {
  constexpr int64_t kRows = 128;
  constexpr int64_t kBlocks = 6;
  std::array<uint8_t, kRows * kBlocks> plain;
  std::iota(plain.begin(), plain.end(), uint8_t{0});
  std::array<uint8_t, kRows * kBlocks> moved{};
  std::array<uint8_t, kRows * 8> expected{};
  std::array<uint8_t, kRows * 8> actual{};
  const auto scale_view = [&](auto& buffer, ScaleLayoutId layout) {
    return ScaleView{.data = buffer.data(),
                     .layout = layout,
                     .rows = kRows,
                     .blocks = kBlocks,
                     .capacity = static_cast<int64_t>(buffer.size())};
  };
  shuffle_rows(TensorView::contiguous(plain.data(), DType::kU8, {kRows, kBlocks}),
               TensorView::contiguous(moved.data(), DType::kU8, {kRows, kBlocks}), 128);
  relayout(FormatId::kNvfp4, scale_view(moved, ScaleLayoutId::kLinear),
           scale_view(expected, ScaleLayoutId::kSwizzled128x4));
  actual.fill(0xCC);
  shuffle_scales(FormatId::kNvfp4, scale_view(plain, ScaleLayoutId::kLinear),
                 scale_view(actual, ScaleLayoutId::kSwizzled128x4), 128);
  EXPECT_EQ(expected, actual);
  moved.fill(0xCC);
  unshuffle_scales(FormatId::kNvfp4, scale_view(actual, ScaleLayoutId::kSwizzled128x4),
                   scale_view(moved, ScaleLayoutId::kLinear), 128);
  EXPECT_EQ(plain, moved);
}

TEST(ShuffleRows, RefusesWhatCannotWork) {
  std::array<uint8_t, 64> in{};
  std::array<uint8_t, 64> out{};
  const auto view = [](auto& buffer, DType dtype, std::initializer_list<int64_t> shape) {
    return TensorView::contiguous(buffer.data(), dtype, shape);
  };
  const auto refused = [&](const std::vector<std::string>& words, const TensorView& input,
                           const TensorView& output, int64_t tile) {
    expect_error(kInvalid, words, [&] { shuffle_rows(input, output, tile); });
    expect_error(kInvalid, words, [&] { unshuffle_rows(input, output, tile); });
  };
  const TensorView good = view(in, DType::kU8, {32, 2});
  const TensorView target = view(out, DType::kU8, {32, 2});
  refused({"epilogue_tile_m", "at least 1", "0"}, good, target, 0);
  refused({"input", "multiple of 32", "U8[16, 4]"}, view(in, DType::kU8, {16, 4}), target, 128);
  refused({"input", "[..., rows, cols]"}, view(in, DType::kU8, {64}), target, 64);
  refused({"output", "BF16"}, view(in, DType::kBF16, {16, 2}), target, 64);
  refused({"output", "U8[32, 2]", "U8[16, 4]"}, good, view(out, DType::kU8, {16, 4}), 64);
  refused({"output", "overlaps input"}, good, good, 64);
  refused({"input", "whole bytes"}, view(in, DType::kF4, {32, 3}), view(out, DType::kF4, {32, 3}),
          64);
  TensorView sparse = target;
  sparse.strides = {1, 1};
  refused({"output", "dense"}, good, sparse, 64);
}

TEST(ShuffleScales, RefusesWhatCannotWork) {
  std::array<uint8_t, 512> in{};
  std::array<uint8_t, 512> out{};
  ScaleView linear{.data = in.data(), .rows = 128, .blocks = 4, .capacity = 512};
  ScaleView swizzled = linear;
  swizzled.data = out.data();
  swizzled.layout = ScaleLayoutId::kSwizzled128x4;
  const auto forth = [&](const ScaleView& from, const ScaleView& to) {
    return [=] { shuffle_scales(FormatId::kNvfp4, from, to, 128); };
  };
  expect_error(kInvalid, {"input", "linear", "swizzled_128x4"}, forth(swizzled, linear));
  expect_error(kInvalid, {"output", "swizzled_128x4", "linear"}, forth(linear, linear));
  ScaleView wide = swizzled;
  wide.blocks = 3;
  expect_error(kInvalid, {"output", "128 x 4", "128 x 3"}, forth(linear, wide));
  ScaleView low = linear;
  low.rows = 64;
  low.capacity = 256;
  ScaleView low_out = swizzled;
  low_out.rows = 64;
  expect_error(kInvalid, {"input", "multiple of 128", "64"}, forth(low, low_out));
  expect_error(kInvalid, {"input", "F32"},
               [&] { shuffle_scales(FormatId::kFp8Block1x128, linear, swizzled, 128); });
}

}  // namespace
}  // namespace narrowfloat::testing
