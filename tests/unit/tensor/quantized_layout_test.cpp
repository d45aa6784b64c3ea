// Sizes of quantized tensors: the byte formulas of spec 13, and every refusal with its message.
#include <gtest/gtest.h>

#include "expect_error.h"
#include "layout_ids.h"
#include "narrowfloat/format.h"

namespace narrowfloat {
namespace {

int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }
int64_t ceil_of(int64_t a, int64_t b) { return (a + b - 1) / b; }

QuantizedLayout layout_of(FormatId format, int64_t rows, int64_t cols,
                          std::optional<ScaleLayoutId> scale_layout = {}, int64_t batch = 1) {
  return quantized_layout(format, rows, cols, {.scale_layout = scale_layout, .batch = batch});
}

TEST(QuantizedLayout, HasTheDocumentedBytesForFp4AndMx) {
  for (const int64_t m : {1, 7, 8, 127, 128, 129, 300}) {
    for (const int64_t k : {32, 64, 96, 1056}) {
      for (const auto& [format, block] :
           std::vector<std::pair<FormatId, int64_t>>{{FormatId::kNvfp4, 16},
                                                     {FormatId::kNvfp4PerToken, 16},
                                                     {FormatId::kMxfp4, 32},
                                                     {FormatId::kMxfp8, 32}}) {
        const int64_t c = k / block;
        const int64_t values = format == FormatId::kMxfp8 ? m * k : m * k / 2;
        EXPECT_EQ(layout_of(format, m, k, kLinear).scales_bytes, m * c);
        EXPECT_EQ(layout_of(format, m, k, k128x4).scales_bytes, up(m, 128) * up(c, 4));
        EXPECT_EQ(layout_of(format, m, k, k8x4).scales_bytes, up(m, 8) * up(c, 4));
        EXPECT_EQ(layout_of(format, m, k).values_bytes, values);
        EXPECT_EQ(layout_of(format, m, k).scale_layout, k128x4);
      }
    }
  }
}

TEST(QuantizedLayout, HasTheDocumentedBytesForFp8) {
  for (const int64_t m : {1, 4, 5, 128, 129}) {
    for (const int64_t k : {16, 128, 144, 7168}) {
      const auto rows = layout_of(FormatId::kFp8Block1x128, m, k);
      EXPECT_EQ(rows.scale_layout, kMnMajor);
      EXPECT_EQ(rows.values_bytes, m * k);
      EXPECT_EQ(rows.scales_bytes, 4 * up(m, 4) * ceil_of(k, 128));
      EXPECT_EQ(layout_of(FormatId::kFp8Block1x128, m, k, kLinear).scales_bytes,
                4 * m * ceil_of(k, 128));
      const auto tiles = layout_of(FormatId::kFp8Block128x128, m, k);
      EXPECT_EQ(tiles.values_bytes, m * k);
      EXPECT_EQ(tiles.scales_bytes, 4 * ceil_of(m, 128) * ceil_of(k, 128));
      EXPECT_EQ(layout_of(FormatId::kFp8Tensor, m, k).scales_bytes, 4);
    }
  }
}

// 8192 x 8192 in bytes, input included, as in spec 13.
TEST(QuantizedLayout, AddsUpToTheDocumentedTotals) {
  const auto total = [](FormatId format) {
    const auto layout = quantized_layout(format, 8192, 8192);
    return 2 * 8192 * 8192 + layout.values_bytes + layout.scales_bytes;
  };
  EXPECT_EQ(total(FormatId::kNvfp4), 171966464);
  EXPECT_EQ(total(FormatId::kMxfp4), 169869312);
  EXPECT_EQ(total(FormatId::kMxfp8), 203423744);
  EXPECT_EQ(total(FormatId::kFp8Block1x128), 203423744);
  EXPECT_EQ(total(FormatId::kFp8Block128x128), 201342976);
}

TEST(QuantizedLayout, CountsGlobalScales) {
  EXPECT_EQ(layout_of(FormatId::kNvfp4, 5, 32, {}, 3).global_scales, 1);
  EXPECT_EQ(layout_of(FormatId::kNvfp4PerToken, 5, 32, {}, 3).global_scales, 15);
  EXPECT_EQ(layout_of(FormatId::kMxfp4, 5, 32).global_scales, 0);
  EXPECT_EQ(layout_of(FormatId::kFp8Tensor, 5, 32).global_scales, 0);
}

TEST(QuantizedLayout, GivesEachBatchScalesOfItsOwn) {
  const auto layout = layout_of(FormatId::kNvfp4, 5, 80, k128x4, 3);
  EXPECT_EQ(layout.values_bytes, 3 * 5 * 40);
  EXPECT_EQ(layout.scale_rows, 5);
  EXPECT_EQ(layout.scale_blocks, 5);
  EXPECT_EQ(layout.scale_count, 3 * 128 * 8);
}

TEST(QuantizedLayout, PadsTheColumnsOfMxfp8ToTheAlignment) {
  const auto layout = quantized_layout(FormatId::kMxfp8, 3, 1568, {.alignment = 128});
  EXPECT_EQ(layout.cols, 1568);
  EXPECT_EQ(layout.value_cols, 1664);
  EXPECT_EQ(layout.values_bytes, 3 * 1664);
  EXPECT_EQ(layout.scale_blocks, 52);
  EXPECT_EQ(quantized_layout(FormatId::kMxfp8, 3, 1568).value_cols, 1568);
}

TEST(QuantizedLayout, PadsTheRowsOfGroups) {
  const auto layout = quantized_layout(FormatId::kFp8Block1x128, 100, 256, {.groups = 3});
  EXPECT_EQ(layout.scale_rows, 192);
  EXPECT_EQ(layout.scale_count, 2 * 192);
}

TEST(QuantizedLayout, OfNothingIsEmpty) {
  const auto no_rows = layout_of(FormatId::kNvfp4, 0, 64);
  EXPECT_EQ(no_rows.values_bytes, 0);
  EXPECT_EQ(no_rows.scales_bytes, 0);
  const auto no_cols = layout_of(FormatId::kMxfp8, 5, 0);
  EXPECT_EQ(no_cols.values_bytes, 0);
  EXPECT_EQ(no_cols.scales_bytes, 0);
  EXPECT_EQ(layout_of(FormatId::kNvfp4PerToken, 5, 0).global_scales, 5);
  EXPECT_EQ(layout_of(FormatId::kNvfp4, 5, 64, {}, 0).values_bytes, 0);
}

TEST(QuantizedLayout, CountsBeyond32Bits) {
  const auto layout = layout_of(FormatId::kNvfp4, 799040, 7168, k128x4);
  EXPECT_EQ(layout.values_bytes, int64_t{799040} * 3584);
  EXPECT_EQ(layout.scales_bytes, up(799040, 128) * 448);
}

TEST(QuantizedLayout, RefusesImpossibleRequestsWithAReason) {
  expect_invalid("rows: expected >= 0, got -1", [] { layout_of(FormatId::kNvfp4, -1, 16); });
  expect_invalid("cols: expected >= 0, got -16", [] { layout_of(FormatId::kNvfp4, 1, -16); });
  expect_invalid("batch: expected >= 0, got -2",
                 [] { layout_of(FormatId::kNvfp4, 1, 16, {}, -2); });
  expect_invalid("cols: nvfp4 needs a multiple of 16, got 24; pad the tensor with zero columns",
                 [] { layout_of(FormatId::kNvfp4, 1, 24); });
  expect_invalid("cols: mxfp8 needs a multiple of 32, got 16; pad the tensor with zero columns",
                 [] { layout_of(FormatId::kMxfp8, 1, 16); });
  expect_invalid("cols: fp8_1x128 needs a multiple of 16, got 8; pad the tensor with zero columns",
                 [] { layout_of(FormatId::kFp8Block1x128, 1, 8); });
  expect_invalid("scale layout: nvfp4 does not allow mn_major; its default is swizzled_128x4",
                 [] { layout_of(FormatId::kNvfp4, 1, 16, kMnMajor); });
  expect_invalid("scale layout: fp8_128x128 does not allow swizzled_8x4; its default is linear",
                 [] { layout_of(FormatId::kFp8Block128x128, 1, 16, k8x4); });
}

TEST(QuantizedLayout, RefusesOptionsOfOtherFormats) {
  for (const int64_t alignment : {0, -32, 48}) {
    expect_invalid(
        "alignment: expected a positive multiple of 32, got " + std::to_string(alignment),
        [&] { quantized_layout(FormatId::kMxfp8, 1, 32, {.alignment = alignment}); });
  }
  expect_invalid("alignment: only mxfp8 pads its columns, got 64 for mxfp4",
                 [] { quantized_layout(FormatId::kMxfp4, 1, 32, {.alignment = 64}); });
  expect_invalid("groups: expected 0, or a positive count for fp8_1x128, got 2 for mxfp4",
                 [] { quantized_layout(FormatId::kMxfp4, 1, 32, {.groups = 2}); });
  expect_invalid("groups: expected 0, or a positive count for fp8_1x128, got -1 for fp8_1x128",
                 [] { quantized_layout(FormatId::kFp8Block1x128, 1, 32, {.groups = -1}); });
  expect_invalid("groups: need batch 1 and layout mn_major, got batch 2 and mn_major", [] {
    quantized_layout(FormatId::kFp8Block1x128, 1, 32, {.batch = 2, .groups = 1});
  });
  expect_invalid("groups: need batch 1 and layout mn_major, got batch 1 and linear", [] {
    quantized_layout(FormatId::kFp8Block1x128, 1, 32, {.scale_layout = kLinear, .groups = 1});
  });
}

TEST(QuantizedLayout, RefusesSizesBeyond63Bits) {
  constexpr int64_t kHuge = int64_t{1} << 40;
  for (const FormatInfo& info : all_formats()) {
    EXPECT_THROW(layout_of(info.id, kHuge, kHuge), Error) << info.name;
    EXPECT_THROW(layout_of(info.id, 1, kHuge, {}, kHuge), Error) << info.name;
    EXPECT_THROW(layout_of(info.id, INT64_MAX, 32), Error) << info.name;
    EXPECT_THROW(layout_of(info.id, 2, INT64_MAX - 31), Error) << info.name;
  }
  EXPECT_THROW(quantized_layout(FormatId::kMxfp8, 1, INT64_MAX - 31, {.alignment = kHuge}), Error);
}

TEST(QuantizedLayout, RefusesPaddedRowsOfGroupsBeyond63Bits) {
  const auto grouped = [](int64_t rows, int64_t groups) {
    return quantized_layout(FormatId::kFp8Block1x128, rows, 16, {.groups = groups});
  };
  // 31 times the second count is 2^64 + 15, which would wrap to a small count.
  for (const int64_t groups : {INT64_MAX, int64_t{595056260442243601}, INT64_MAX / 31 + 1}) {
    expect_invalid(
        "groups: " + std::to_string(groups) + " groups of 1 rows in all exceed 2^63 scale rows",
        [&] { (void)grouped(1, groups); });
  }
  EXPECT_THROW((void)grouped(INT64_MAX, 1), Error);
  EXPECT_EQ(grouped(1, 1000000).scale_rows, 31000000);
}

TEST(QuantizedLayout, BindsViewsOfExactlyItsSizes) {
  const auto layout = quantized_layout(FormatId::kNvfp4PerToken, 5, 80, {.batch = 3});
  uint8_t values = 0;
  uint8_t scales = 0;
  float global = 0;
  const QuantizedView view = layout.bind(&values, &scales, &global, {DeviceType::kCuda, 2});
  EXPECT_EQ(view.format, FormatId::kNvfp4PerToken);
  EXPECT_EQ(to_string(view.values), "U8[3, 5, 40]");
  EXPECT_EQ(to_string(view.global_scale), "F32[15]");
  EXPECT_EQ(view.values.data, &values);
  EXPECT_EQ(view.scales.data, &scales);
  EXPECT_EQ(view.global_scale.data, &global);
  EXPECT_EQ(view.scales.capacity, layout.scale_count);
  EXPECT_EQ(view.scales.type, ScaleType::kE4M3);
  EXPECT_EQ(view.scales.batch, 3);
  EXPECT_EQ(view.values.device, (Device{DeviceType::kCuda, 2}));
  EXPECT_EQ(view.scales.device, (Device{DeviceType::kCuda, 2}));
  const auto mx = quantized_layout(FormatId::kMxfp8, 5, 96, {.alignment = 64});
  const QuantizedView mx_view = mx.bind(&values, &scales, nullptr);
  EXPECT_EQ(to_string(mx_view.values), "F8_E4M3[1, 5, 128]");
  EXPECT_EQ(mx_view.cols, 96);
  EXPECT_TRUE(mx_view.global_scale.is_absent());
}

}  // namespace
}  // namespace narrowfloat
