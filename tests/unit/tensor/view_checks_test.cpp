// Each check at the door violated once, with its whole message: argument, expected, got.
#include "tensor/view_checks.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "expect_error.h"

namespace narrowfloat {
namespace {

alignas(16) uint8_t buffer[4096];
const Device kGpu{DeviceType::kCuda, 0};

TensorView view(DType dtype, std::initializer_list<int64_t> shape) {
  return TensorView::contiguous(buffer, dtype, shape);
}

TEST(RequireDtype, NamesAllThatAreAllowed) {
  EXPECT_NO_THROW(require_dtype("x", view(DType::kF16, {1}), {DType::kBF16, DType::kF16}));
  expect_invalid("x: expected dtype BF16 or F16, got I32; convert it first", [] {
    require_dtype("x", view(DType::kI32, {1}), {DType::kBF16, DType::kF16});
  });
}

TEST(RequireDevice, ComparesTypeAndIndex) {
  EXPECT_NO_THROW(require_device("x", kGpu, kGpu));
  expect_invalid("x: expected device cpu as the input, got cuda:0",
                 [] { require_device("x", kGpu, Device{}); });
  EXPECT_THROW(require_device("x", kGpu, Device{DeviceType::kCuda, 1}), Error);
}

TEST(RequireData, RefusesNullAndMisalignedDataUnlessEmpty) {
  TensorView tensor = view(DType::kF32, {2, 3});
  EXPECT_NO_THROW(require_data("x", tensor));
  tensor.data = nullptr;
  expect_invalid("x: data is null for F32[2, 3]", [&] { require_data("x", tensor); });
  tensor.data = buffer + 2;
  EXPECT_THROW(require_data("x", tensor), Error);
  try {
    require_data("x", tensor);
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).find("x: expected an address aligned to 4 bytes, got 0x"),
              0U);
  }
  tensor.dtype = DType::kBF16;
  EXPECT_NO_THROW(require_data("x", tensor));
  EXPECT_NO_THROW(require_data("x", TensorView::contiguous(nullptr, DType::kF32, {0, 3})));
}

TEST(RequireDense, RefusesAnyStrideThatIsNotRowMajor) {
  TensorView tensor = view(DType::kF32, {2, 3});
  EXPECT_NO_THROW(require_dense("x", tensor));
  tensor.strides = {4, 1};
  expect_invalid("x: expected a dense row-major tensor, got stride 4 on axis 0 (dense: 3)",
                 [&] { require_dense("x", tensor); });
  // The stride of an axis of one entry is never used.
  tensor.shape = {1, 3};
  EXPECT_NO_THROW(require_dense("x", tensor));
  tensor.shape = {2, 0};
  EXPECT_NO_THROW(require_dense("x", tensor));
}

TEST(RequireVector, ChecksTypeDeviceCountAndStride) {
  TensorView tensor = view(DType::kF32, {4});
  const auto require = [&] { require_vector("x", tensor, DType::kF32, 4, Device{}); };
  EXPECT_NO_THROW(require());
  tensor.shape[0] = 5;
  expect_invalid("x: expected 4 values, got F32[5]", require);
  tensor.shape[0] = 4;
  tensor.strides[0] = 2;
  EXPECT_THROW(require(), Error);
  tensor.strides[0] = 1;
  tensor.device = kGpu;
  EXPECT_THROW(require(), Error);
  tensor.device = {};
  tensor.dtype = DType::kI32;
  EXPECT_THROW(require(), Error);
  tensor.dtype = DType::kF32;
  tensor.data = nullptr;
  EXPECT_THROW(require(), Error);
}

TEST(RequireRows, FlattensLeadingAxes) {
  const RowMatrix rows = require_rows("x", view(DType::kBF16, {2, 3, 8}), 8);
  EXPECT_EQ(rows.rows, 6);
  EXPECT_EQ(rows.stride, 8);
  TensorView sliced = view(DType::kBF16, {2, 3, 8});
  sliced.strides = {60, 20, 1};
  EXPECT_EQ(require_rows("x", sliced, 8).stride, 20);
  // Axes of one entry may have any stride.
  sliced.shape = {2, 1, 8};
  EXPECT_EQ(require_rows("x", sliced, 8).stride, 60);
  EXPECT_EQ(require_rows("x", view(DType::kBF16, {8}), 8).rows, 1);
  EXPECT_EQ(require_rows("x", view(DType::kBF16, {0, 8}), 8).rows, 0);
}

TEST(RequireRows, RefusesWhatIsNoMatrixOfRows) {
  expect_invalid("x: expected at least one axis, got a scalar",
                 [] { require_rows("x", view(DType::kBF16, {}), 8); });
  expect_invalid("x: expected 16 columns in the last axis, got BF16[2, 8]", [] {
    require_rows("x", view(DType::kBF16, {2, 8}), 16);
  });
  TensorView tensor = view(DType::kBF16, {2, 3, 8});
  tensor.strides = {24, 8, 2};
  expect_invalid("x: expected stride 1 in the last axis, got 2; make it contiguous",
                 [&] { require_rows("x", tensor, 8); });
  tensor.strides = {12, 4, 1};
  expect_invalid("x: expected a row stride of at least 8, got 4",
                 [&] { require_rows("x", tensor, 8); });
  tensor.strides = {40, 8, 1};
  expect_invalid("x: leading axes do not form rows of one stride: expected 24 on axis 0, got 40",
                 [&] { require_rows("x", tensor, 8); });
  tensor.strides = {40, int64_t{1} << 62, 1};
  expect_invalid("x: extents and strides of BF16[2, 3, 8] span more than 2^63 elements",
                 [&] { require_rows("x", tensor, 8); });
}

TEST(RequireBatchedRows, TakesAnyTwoStridesButOnlyThoseThatAreUsed) {
  TensorView tensor = view(DType::kBF16, {2, 3, 8});
  const auto strides = [&](std::initializer_list<int64_t> extents,
                           std::initializer_list<int64_t> steps) {
    std::copy(extents.begin(), extents.end(), tensor.shape.begin());
    std::copy(steps.begin(), steps.end(), tensor.strides.begin());
    const BatchedRows rows = require_batched_rows("x", tensor, tensor.shape[0], tensor.shape[1], 8);
    return std::pair{rows.batch_stride, rows.row_stride};
  };
  EXPECT_EQ(strides({2, 3, 8}, {16, 32, 1}), (std::pair<int64_t, int64_t>{16, 32}));
  // y[..., None].transpose(1, 2) has stride 1 on the new axis.
  EXPECT_EQ(strides({2, 1, 8}, {24, 1, 1}), (std::pair<int64_t, int64_t>{24, 24}));
  EXPECT_EQ(strides({2, 1, 8}, {24, 9, 1}), (std::pair<int64_t, int64_t>{24, 24}));
  EXPECT_EQ(strides({1, 3, 8}, {1, 16, 1}), (std::pair<int64_t, int64_t>{16, 16}));
  EXPECT_EQ(strides({1, 1, 8}, {1, 9, 1}), (std::pair<int64_t, int64_t>{8, 8}));
  EXPECT_THROW(strides({2, 3, 8}, {24, 1, 1}), Error);
  // Rows without columns may have strides that no 64 bits hold times the number of rows.
  tensor.shape = {4, 3, 0};
  tensor.strides = {int64_t{1} << 62, int64_t{1} << 62, 1};
  const BatchedRows empty = require_batched_rows("x", tensor, 4, 3, 0);
  EXPECT_EQ(empty.batch_stride, 0);
  EXPECT_EQ(empty.row_stride, 0);
}

ScaleView scales_of(const QuantizedLayout& layout) {
  return layout.bind(buffer, buffer, reinterpret_cast<float*>(buffer)).scales;
}

TEST(RequireScales, ChecksTypeLayoutExtentsAndBuffer) {
  const ScaleView good = scales_of(quantized_layout(FormatId::kNvfp4, 3, 64));
  const auto refuse = [](const std::string& message, const ScaleView& scales) {
    expect_invalid(message, [&] { require_scales("s", scales, FormatId::kNvfp4); });
  };
  EXPECT_NO_THROW(require_scales("s", good, FormatId::kNvfp4));
  ScaleView bad = good;
  bad.type = ScaleType::kUE8M0;
  refuse("s: nvfp4 has E4M3 scales, got UE8M0", bad);
  bad = good;
  bad.layout = ScaleLayoutId::kMnMajor;
  refuse("s: nvfp4 does not allow layout mn_major; its default is swizzled_128x4", bad);
  bad = good;
  bad.batch = -1;
  refuse("s: expected batch >= 0, got -1", bad);
  bad = good;
  bad.capacity = 511;
  refuse(
      "s: expected a buffer of 512 scales (1 x 3 x 4 in swizzled_128x4, padding included), got 511",
      bad);
  bad = good;
  bad.data = nullptr;
  refuse("s: data is null", bad);
  bad = good;
  bad.batch = int64_t{1} << 60;
  refuse("s: more than 2^63 bytes of scales", bad);
}

TEST(RequireScales, WantsF32ScalesAligned) {
  ScaleView scales = scales_of(quantized_layout(FormatId::kFp8Block1x128, 3, 128));
  EXPECT_NO_THROW(require_scales("s", scales, FormatId::kFp8Block1x128));
  scales.data = buffer + 1;
  expect_invalid("s: expected an address aligned to 4 bytes",
                 [&] { require_scales("s", scales, FormatId::kFp8Block1x128); });
}

class RequireQuantized : public ::testing::Test {
 protected:
  void refuse(const std::string& message) const {
    expect_invalid(message, [&] { require_quantized("q", view_, 3); });
  }
  QuantizedView view_ = quantized_layout(FormatId::kNvfp4, 3, 64, {.batch = 2})
                            .bind(buffer, buffer, reinterpret_cast<float*>(buffer));
};

TEST_F(RequireQuantized, AcceptsWhatBindMade) {
  EXPECT_NO_THROW(require_quantized("q", view_, 3));
  view_.values = view(DType::kU8, {6, 32});
  EXPECT_NO_THROW(require_quantized("q", view_, 3));
}

TEST_F(RequireQuantized, RefusesNegativeExtents) {
  view_.rows = -1;
  refuse("q: expected extents >= 0, got 2 x -1 x 64");
}

TEST_F(RequireQuantized, RefusesColumnsThatAreNotBlocks) {
  view_.cols = 60;
  refuse("q: nvfp4 needs columns in multiples of 16, got 60");
}

TEST_F(RequireQuantized, RefusesValuesOfAnotherType) {
  view_.values.dtype = DType::kF8E4M3;
  refuse("q.values: expected dtype U8, got F8_E4M3; convert it first");
}

TEST_F(RequireQuantized, RefusesValuesOfAnotherShape) {
  view_.values = view(DType::kU8, {2, 3, 64});
  refuse("q.values: expected 32 columns in the last axis, got U8[2, 3, 64]");
  view_.values = view(DType::kU8, {2, 2, 32});
  refuse("q.values: expected 2 x 3 rows, got U8[2, 2, 32]");
  view_.values = view(DType::kU8, {});
  refuse("q.values: expected at least one axis");
}

TEST_F(RequireQuantized, RefusesValuesWithGaps) {
  view_.values.strides = {120, 40, 1};
  refuse("q.values: expected a dense row-major tensor, got stride 40 on axis 1 (dense: 32)");
}

TEST_F(RequireQuantized, RefusesScalesOfOtherExtents) {
  view_.scales = scales_of(quantized_layout(FormatId::kNvfp4, 3, 128, {.batch = 2}));
  refuse("q.scales: expected 2 x 3 x 4 (batch x rows x blocks), got 2 x 3 x 8");
}

TEST_F(RequireQuantized, RefusesValuesAndScalesOnDifferentDevices) {
  view_.values.device = kGpu;
  refuse("q.values: expected device cpu as the input, got cuda:0");
}

TEST_F(RequireQuantized, TakesPaddedColumnsForMxfp8Only) {
  view_ =
      quantized_layout(FormatId::kMxfp8, 3, 96, {.alignment = 128}).bind(buffer, buffer, nullptr);
  EXPECT_NO_THROW(require_quantized("q", view_, 3));
  view_ = quantized_layout(FormatId::kMxfp8, 3, 96).bind(buffer, buffer, nullptr);
  view_.values = view(DType::kF8E4M3, {3, 112});
  refuse("q.values: expected 96 columns in the last axis, got F8_E4M3[3, 112]");
}

TEST(RequireRowOffsets, WantsAscendingOffsetsFromZeroToTheRows) {
  const auto require = [](std::vector<int64_t> offsets) {
    require_row_offsets(TensorView::contiguous(offsets.data(), DType::kI64, {std::ssize(offsets)}),
                        10, Device{});
  };
  EXPECT_NO_THROW(require({0, 10}));
  EXPECT_NO_THROW(require({0, 0, 4, 4, 10, 10}));
  expect_invalid("row_offsets: expected I64 [groups + 1] with at least one group, got I64[1]",
                 [&] { require({10}); });
  expect_invalid("row_offsets: expected to run from 0 to 10, got 1 to 10", [&] {
    require({1, 10});
  });
  expect_invalid("row_offsets: expected to run from 0 to 10, got 0 to 9", [&] { require({0, 9}); });
  expect_invalid("row_offsets: expected ascending values, got 7 before 5 at 1", [&] {
    require({0, 7, 5, 10});
  });
}

TEST(ByteRange, RefusesStridesAndExtentsThatOverflow) {
  TensorView strided = view(DType::kF32, {3, 2});
  EXPECT_EQ(byte_range("x", strided).size_bytes, 24);
  strided.strides[0] = int64_t{1} << 62;
  expect_invalid("x: extents and strides of F32[3, 2] span more than 2^63 bits",
                 [&] { byte_range("x", strided); });
  // 2^61 bytes are 2^64 bits.
  EXPECT_THROW(byte_range("x", view(DType::kU8, {int64_t{1} << 61})), Error);
}

}  // namespace
}  // namespace narrowfloat
