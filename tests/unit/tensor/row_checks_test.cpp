// Checks of activation rows: what is refused, and which strides of scales are.
#include "tensor/row_checks.h"

#include <array>

#include <gtest/gtest.h>

#include "expect_error.h"

namespace narrowfloat {
namespace {

constexpr RowNames kNames{"a.values", "a.scales", "a.row_scale"};

// [3, 32] rows of every format.
struct Rows {
  std::array<float, 96> values{};
  std::array<float, 64> scales{};
  std::array<float, 3> row_scales{};

  CodedRows nvfp4() {
    return {.values = TensorView::contiguous(values.data(), DType::kU8, {3, 16}),
            .scales = TensorView::contiguous(scales.data(), DType::kF8E4M3, {3, 2}),
            .row_scale = TensorView::contiguous(row_scales.data(), DType::kF32, {3})};
  }
};

constexpr RowShape kShape{.format = RowFormat::kNvfp4PerToken, .rows = 3, .cols = 32};

TEST(RequireCodedRows, TakesTypedAndUntypedBytes) {
  Rows rows;
  CodedRows view = rows.nvfp4();
  EXPECT_NO_THROW(require_quantized_rows(kNames, view, kShape));
  view.scales.dtype = DType::kU8;
  EXPECT_NO_THROW(require_quantized_rows(kNames, view, kShape));
}

TEST(RequireCodedRows, RefusesWhatIsNotTheFormat) {
  Rows rows;
  CodedRows view = rows.nvfp4();
  view.scales.dtype = DType::kF8E8M0;
  expect_invalid("a.scales: expected dtype F8_E4M3 or U8, got F8_E8M0; convert it first",
                 [&] { require_quantized_rows(kNames, view, kShape); });
  view = rows.nvfp4();
  view.scales.shape[1] = 3;
  expect_invalid("a.scales: expected [3, 2], got F8_E4M3[3, 3]",
                 [&] { require_quantized_rows(kNames, view, kShape); });
  view = rows.nvfp4();
  expect_invalid("a.row_scale: nvfp4 has none; leave it unset", [&] {
    require_quantized_rows(kNames, view, {.format = RowFormat::kNvfp4, .rows = 3, .cols = 32});
  });
  view.values.dtype = DType::kF8E4M3;
  view.row_scale = {};
  expect_invalid("a.scales: fp8_static has none; leave it unset", [&] {
    require_quantized_rows(kNames, view, {.format = RowFormat::kFp8Static, .rows = 3, .cols = 16});
  });
  expect_invalid("a.values: mxfp8 needs columns in multiples of 32, got 16", [&] {
    require_quantized_rows(kNames, view, {.format = RowFormat::kMxfp8, .rows = 3, .cols = 16});
  });
}

TEST(RequireRowScales, WantsAPlaceForEveryScaleThatIsWritten) {
  Rows rows;
  TensorView scales = TensorView::contiguous(rows.scales.data(), DType::kF32, {3, 4});
  const RowShape written{
      .format = RowFormat::kFp8Group, .rows = 3, .cols = 512, .is_written = true};
  RowShape read = written;
  read.is_written = false;
  struct Case {
    int64_t row, block;
    bool is_distinct;
  };
  for (const auto& [row, block, is_distinct] :
       {Case{4, 1, true}, Case{1, 3, true}, Case{1, 5, true}, Case{7, 2, true}, Case{3, 1, false},
        Case{1, 2, false}, Case{0, 1, false}, Case{1, 0, false}}) {
    scales.strides = {row, block};
    EXPECT_NO_THROW(require_row_scales("s", scales, read)) << row << ", " << block;
    if (is_distinct) {
      EXPECT_NO_THROW(require_row_scales("s", scales, written)) << row << ", " << block;
    } else {
      EXPECT_THROW(require_row_scales("s", scales, written), Error) << row << ", " << block;
    }
  }
  scales.strides = {-4, 1};
  EXPECT_THROW(require_row_scales("s", scales, read), Error);
  read.reads_scale_strides = false;
  EXPECT_NO_THROW(require_row_scales("s", scales, read));
}

}  // namespace
}  // namespace narrowfloat
