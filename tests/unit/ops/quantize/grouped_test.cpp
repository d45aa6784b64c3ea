// Batched, grouped and per-token forms against dense calls (spec 6.2, 8.3, 8.4, 8.6).
#include <algorithm>
#include <cmath>
#include <limits>
#include <ostream>

#include <gtest/gtest.h>

#include "support/tensors.h"
#include "unit/ops/quantize/plain_model.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kBatch = 5;
constexpr int64_t kGroupedRows = 37;
constexpr int64_t kGroupedCols = 96;

const std::vector<int32_t> kValidRows{0, 1, kGroupedRows, kGroupedRows + 9, -4};

int64_t clamped(int32_t count) { return std::clamp<int64_t>(count, 0, kGroupedRows); }

// The first `rows` rows of one batch.
Matrix prefix(const Matrix& input, int64_t batch, int64_t rows) {
  MatrixShape shape = input.shape();
  shape.batch = 1;
  shape.rows = rows;
  shape.gap = 0;
  Matrix out(shape);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = 0; col < shape.cols; ++col) {
      out.set(row, col, input.at(batch * input.shape().rows + row, col));
    }
  }
  return out;
}

uint8_t scale_at(const QuantizedTensor& tensor, int64_t batch, int64_t row, int64_t block) {
  const QuantizedLayout& layout = tensor.layout;
  const int64_t scales_per_batch = layout.scale_count / std::max<int64_t>(1, layout.batch);
  return tensor.scales
      .data()[batch * scales_per_batch + scale_offset(layout.scale_layout, row, block,
                                                      layout.scale_rows, layout.scale_blocks)];
}

// Batch `batch` of `grouped` is `dense` on the rows of `dense`, untouched and zero after them.
void expect_prefix(const QuantizedTensor& grouped, int64_t batch, const QuantizedTensor& dense) {
  const int64_t row_bytes = grouped.layout.values_bytes / (kBatch * kGroupedRows);
  const auto values =
      grouped.values.span().subspan(static_cast<size_t>(batch * kGroupedRows * row_bytes),
                                    static_cast<size_t>(kGroupedRows * row_bytes));
  const int64_t valid = dense.layout.rows;
  const auto split = values.begin() + valid * row_bytes;
  EXPECT_TRUE(std::equal(values.begin(), split, dense.values.span().begin()));
  EXPECT_TRUE(std::all_of(split, values.end(), [](uint8_t byte) { return byte == 0xCC; }));
  for (int64_t row = 0; row < kGroupedRows; ++row) {
    for (int64_t block = 0; block < grouped.layout.scale_blocks; ++block) {
      const int expected = row < valid ? scale_at(dense, 0, row, block) : 0;
      EXPECT_EQ(expected, scale_at(grouped, batch, row, block)) << row << ", " << block;
    }
  }
}

struct GroupedSetting {
  FormatId format;
  MathMode math;
};

std::string test_name(const GroupedSetting& setting) {
  return std::string(name(setting.format)) + "_" + std::string(name(setting.math));
}
void PrintTo(const GroupedSetting& setting, std::ostream* out) { *out << test_name(setting); }

class GroupedQuantize : public ::testing::TestWithParam<GroupedSetting> {
 protected:
  [[nodiscard]] QuantizeTo target() const {
    return {.format = GetParam().format,
            .layout = ScaleLayoutId::kSwizzled128x4,
            .options = {.math = GetParam().math},
            .alignment = GetParam().format == FormatId::kMxfp8 ? 128 : 32};
  }
  Matrix input_ = Matrix::filled(
      {.dtype = DType::kBF16, .batch = kBatch, .rows = kGroupedRows, .cols = kGroupedCols},
      Fill::kNormalRows, 9);
  Vector valid_rows_ = Vector::of(DType::kI32, kValidRows);
};

TEST_P(GroupedQuantize, EqualsDenseCallsOnTheValidRows) {
  QuantizeTo grouped_target = target();
  grouped_target.options.valid_rows = valid_rows_.view();
  const QuantizedTensor grouped = quantized(input_, grouped_target);
  for (int64_t batch = 0; batch < kBatch; ++batch) {
    const int64_t valid = clamped(kValidRows[static_cast<size_t>(batch)]);
    const QuantizedTensor dense = quantized(prefix(input_, batch, valid), target());
    SCOPED_TRACE(batch);
    expect_prefix(grouped, batch, dense);
    // The scale of a batch comes from its own valid rows, per-token scales from their row.
    const size_t per_batch = grouped.global_scale.span<uint32_t>().size() / kBatch;
    for (size_t i = 0; i < per_batch; ++i) {
      const bool exists = i < dense.global_scale.span<uint32_t>().size();
      EXPECT_EQ(grouped.global_scale.span<uint32_t>()[static_cast<size_t>(batch) * per_batch + i],
                exists ? dense.global_scale.span<uint32_t>()[i] : 0U);
    }
  }
}

TEST_P(GroupedQuantize, BatchesEqualDenseCalls) {
  QuantizeTo given = target();
  if (given.format == FormatId::kNvfp4) given.options.encode_scale = 77.0F;
  const QuantizedTensor batched = quantized(input_, given);
  for (int64_t batch = 0; batch < kBatch; ++batch) {
    expect_prefix(batched, batch, quantized(prefix(input_, batch, kGroupedRows), given));
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, GroupedQuantize,
                         ::testing::Values(GroupedSetting{FormatId::kNvfp4, MathMode::kExact},
                                           GroupedSetting{FormatId::kNvfp4, MathMode::kFast},
                                           GroupedSetting{FormatId::kNvfp4PerToken,
                                                          MathMode::kExact},
                                           GroupedSetting{FormatId::kMxfp4, MathMode::kFast},
                                           GroupedSetting{FormatId::kMxfp8, MathMode::kExact}),
                         [](const auto& test) { return test_name(test.param); });

TEST(GroupedQuantizeNvfp4, TakesOneEncodeScaleForEachBatch) {
  const Matrix input = Matrix::filled(
      {.dtype = DType::kF16, .batch = kBatch, .rows = kGroupedRows, .cols = kGroupedCols},
      Fill::kNormal, 10);
  const Vector valid = Vector::of(DType::kI32, kValidRows);
  const std::vector<float> factors{1.0F, 0.5F, 300.0F, 2688.0F, 7.0F};
  const Vector scales = Vector::of(DType::kF32, factors);
  QuantizeTo target{.format = FormatId::kNvfp4};
  target.options.valid_rows = valid.view();
  target.options.encode_scales = scales.view();
  const QuantizedTensor grouped = quantized(input, target);
  for (int64_t batch = 0; batch < kBatch; ++batch) {
    const float g = factors[static_cast<size_t>(batch)];
    const int64_t rows = clamped(kValidRows[static_cast<size_t>(batch)]);
    expect_prefix(grouped, batch,
                  quantized(prefix(input, batch, rows),
                            {.format = FormatId::kNvfp4, .options = {.encode_scale = g}}));
    EXPECT_EQ(grouped.global_scale.span<float>()[static_cast<size_t>(batch)], 1.0F / g);
  }
}

TEST(GroupedQuantizeNvfp4, SiluMulEqualsDenseCalls) {
  const Matrix input = Matrix::filled(
      {.dtype = DType::kBF16, .batch = kBatch, .rows = kGroupedRows, .cols = 2 * kGroupedCols},
      Fill::kNormal, 8);
  const Vector valid = Vector::of(DType::kI32, kValidRows);
  const QuantizedTensor grouped(
      quantized_layout(FormatId::kNvfp4, kGroupedRows, kGroupedCols, {.batch = kBatch}));
  QuantizeOptions options{.encode_scale = 55.0F};
  options.valid_rows = valid.view();
  silu_mul_quantize(input.view(), grouped.view, options);
  for (int64_t batch = 0; batch < kBatch; ++batch) {
    const int64_t rows = clamped(kValidRows[static_cast<size_t>(batch)]);
    const QuantizedTensor dense(quantized_layout(FormatId::kNvfp4, rows, kGroupedCols));
    silu_mul_quantize(prefix(input, batch, rows).view(), dense.view, {.encode_scale = 55.0F});
    expect_prefix(grouped, batch, dense);
  }
}

TEST(Nvfp4EncodeScales, OneForEachRowEqualsOneCallForEachRow) {
  const Matrix input = Matrix::filled(
      {.dtype = DType::kBF16, .rows = kGroupedRows, .cols = kGroupedCols}, Fill::kNormal, 21);
  std::vector<float> factors(kGroupedRows);
  for (size_t i = 0; i < factors.size(); ++i) factors[i] = 1.0F + static_cast<float>(i * i);
  const Vector scales = Vector::of(DType::kF32, factors);
  QuantizeTo target{.format = FormatId::kNvfp4, .layout = ScaleLayoutId::kLinear};
  target.options.encode_scales = scales.view();
  const QuantizedTensor all = quantized(input, target);
  for (int64_t row = 0; row < kGroupedRows; ++row) {
    const float g = factors[static_cast<size_t>(row)];
    Matrix one({.dtype = DType::kBF16, .rows = 1, .cols = kGroupedCols});
    for (int64_t col = 0; col < kGroupedCols; ++col) one.set(0, col, input.at(row, col));
    const QuantizedTensor alone = quantized(one, {.format = FormatId::kNvfp4,
                                                  .layout = ScaleLayoutId::kLinear,
                                                  .options = {.encode_scale = g}});
    EXPECT_TRUE(std::equal(alone.values.span().begin(), alone.values.span().end(),
                           all.values.data() + row * kGroupedCols / 2));
    EXPECT_TRUE(std::equal(alone.scales.span().begin(), alone.scales.span().end(),
                           all.scales.data() + row * kGroupedCols / 16));
    EXPECT_EQ(all.global_scale.span<float>()[static_cast<size_t>(row)], 1.0F / g);
  }
}

// Spec 8.6: the scale of row m of group i, column block c, is at c * LD + (m - o_i) + p_i.
TEST(GroupedFp8, PlacesEachGroupsScalesAtItsPaddedRows) {
  const std::vector<std::vector<int64_t>> splits{
      {0, 100}, {0, 0, 33, 33, 100}, {0, 1, 2, 100, 100}, {0, 32, 64, 96, 100}, {0, 0, 0, 100}};
  const Matrix input =
      Matrix::filled({.dtype = DType::kBF16, .rows = 100, .cols = 400}, Fill::kNormalRows, 12);
  for (const MathMode math : {MathMode::kExact, MathMode::kFast}) {
    const QuantizedTensor dense = quantized(input, {.format = FormatId::kFp8Block1x128,
                                                    .layout = ScaleLayoutId::kLinear,
                                                    .options = {.math = math}});
    for (const std::vector<int64_t>& offsets : splits) {
      const auto groups = static_cast<int64_t>(offsets.size()) - 1;
      const QuantizedTensor grouped(
          quantized_layout(FormatId::kFp8Block1x128, 100, 400, {.groups = groups}));
      const Vector view = Vector::of(DType::kI64, offsets);
      QuantizeOptions options{.math = math};
      options.row_offsets = view.view();
      quantize(input.view(), grouped.view, options);
      EXPECT_EQ(grouped.values.copy(), dense.values.copy());
      const int64_t ld = (offsets.back() + 31 * groups) / 32 * 32;
      std::vector<uint32_t> expected(static_cast<size_t>(4 * ld), 0);
      for (int64_t i = 0; i < groups; ++i) {
        const int64_t start = offsets[static_cast<size_t>(i)];
        const int64_t padded = (start + 31 * i) / 32 * 32;
        for (int64_t m = start; m < offsets[static_cast<size_t>(i + 1)]; ++m) {
          for (int64_t c = 0; c < 4; ++c) {
            expected[static_cast<size_t>(c * ld + (m - start) + padded)] =
                dense.scales.data<uint32_t>()[m * 4 + c];
          }
        }
      }
      const auto actual = grouped.scales.span<uint32_t>();
      EXPECT_EQ(expected, std::vector<uint32_t>(actual.begin(), actual.end()));
      // And back.
      Matrix decoded({.dtype = DType::kF32, .rows = 100, .cols = 400});
      dequantize(grouped.view, decoded.view(), {.row_offsets = view.view()});
      EXPECT_EQ(decoded.elements(), dequantized(dense.view).elements());
    }
  }
}

// Spec 6.2 once more: the row's factors, then a block of 6.1.
struct TokenScale {
  float stored;
  float encode;
  float decode;
};

TokenScale model_token_scale(float amax, float base, MathMode math) {
  if (math == MathMode::kFast) {
    const float d = multiply(amax, base, math);
    return {d, reciprocal(d, math), d};
  }
  const float largest = std::numeric_limits<float>::max();
  if (amax == 0.0F) return {0.0F, largest, 1.0F / largest};
  const float g = std::fmin((1.0F / base) / amax, largest);
  return {1.0F / g, g, 1.0F / g};
}

void expect_token_row(const Matrix& input, const QuantizedTensor& tensor, int64_t row,
                      MathMode math) {
  float amax = 0.0F;
  for (int64_t col = 0; col < 16; ++col) amax = std::max(amax, std::abs(input.at(row, col)));
  const TokenScale token = model_token_scale(amax, 1.0F / 2688.0F, math);
  ASSERT_EQ(tensor.global_scale.span<float>()[static_cast<size_t>(row)], token.stored);
  const float sixth = 1.0F / 6.0F;
  const float scale = math == MathMode::kExact
                          ? amax * (token.encode * sixth)
                          : multiply(token.encode, multiply(amax, sixth, math), math);
  const uint8_t code = amax == 0.0F && math == MathMode::kExact ? 0 : model_e4m3(scale);
  ASSERT_EQ(tensor.scales.data()[row], code);
  float m = reciprocal(multiply(model_e4m3_value(code), token.decode, math), math);
  if (math == MathMode::kExact) m = std::fmin(m, std::numeric_limits<float>::max());
  if (amax == 0.0F) m = 0.0F;
  for (int64_t col = 0; col < 16; ++col) {
    const uint8_t byte = tensor.values.data()[row * 8 + col / 2];
    const int actual = col % 2 == 0 ? byte & 0xF : byte >> 4;
    ASSERT_EQ(actual, model_e2m1(multiply(input.at(row, col), m, math)))
        << "row " << row << " col " << col << " amax " << amax;
  }
}

TEST(PerToken, RowsOfSmallIntegersTimesAPowerOfTwo) {
  constexpr int64_t kTokens = 20000;
  Random random(17);
  const Matrix input({.dtype = DType::kBF16, .rows = kTokens, .cols = 16});
  for (int64_t row = 0; row < kTokens; ++row) {
    const auto exponent = static_cast<int>(random.range(-30, 30));
    const auto largest = random.range(1, 127);
    for (int64_t col = 0; col < 16; ++col) {
      const auto value = static_cast<float>(random.range(-largest, largest));
      input.set(row, col, row % 97 == 0 ? 0.0F : std::ldexp(value, exponent));
    }
  }
  for (const MathMode math : {MathMode::kExact, MathMode::kFast}) {
    const QuantizedTensor tensor = quantized(input, {.format = FormatId::kNvfp4PerToken,
                                                     .layout = ScaleLayoutId::kLinear,
                                                     .options = {.math = math}});
    for (int64_t row = 0; row < kTokens; ++row) {
      SCOPED_TRACE(name(math));
      expect_token_row(input, tensor, row, math);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(PerToken, RowListVisitsListedRowsOnceAndZeroesTheOthersScales) {
  const Matrix input =
      Matrix::filled({.dtype = DType::kBF16, .rows = 6, .cols = 32}, Fill::kNormal, 3);
  const Vector list = Vector::of<int32_t>(DType::kI32, {4, -1, 1, 6, 4, INT32_MAX, INT32_MIN, 1});
  QuantizeTo target{.format = FormatId::kNvfp4PerToken, .layout = ScaleLayoutId::kLinear};
  const QuantizedTensor all = quantized(input, target);
  target.options.row_list = list.view();
  const QuantizedTensor some = quantized(input, target);
  for (int64_t row = 0; row < 6; ++row) {
    const bool listed = row == 1 || row == 4;
    for (int64_t i = row * 16; i < (row + 1) * 16; ++i) {
      EXPECT_EQ(some.values.data()[i], listed ? all.values.data()[i] : 0xCC);
    }
    for (int64_t i = row * 2; i < (row + 1) * 2; ++i) {
      EXPECT_EQ(some.scales.data()[i], listed ? all.scales.data()[i] : 0);
    }
    EXPECT_EQ(some.global_scale.data<float>()[row],
              listed ? all.global_scale.data<float>()[row] : 0.0F);
  }
}

TEST(PerToken, ZeroColumnsStillGiveRowScalesOfZero) {
  const QuantizedTensor tensor(quantized_layout(FormatId::kNvfp4PerToken, 3, 0));
  quantize(TensorView::contiguous(nullptr, DType::kBF16, {3, 0}), tensor.view);
  EXPECT_EQ(tensor.global_scale.copy(), std::vector<uint8_t>(12, 0));
}

}  // namespace
}  // namespace narrowfloat::testing
