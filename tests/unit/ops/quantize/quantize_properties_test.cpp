// Laws of quantize that hold for every shape and all data: RapidCheck draws (and shrinks) the
// shapes and options, a seed stands for the data.
#include <cmath>
#include <cstdlib>
#include <cstring>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "support/environment.h"
#include "support/tensors.h"
#include "tensor/block_math.h"

namespace narrowfloat::testing {
namespace {

// The same cases every time unless the environment says otherwise.
const bool kIsSeeded = setenv("RC_PARAMS", "seed=20260801 max_success=300", 0) == 0;

struct Drawn {
  FormatId format;
  ScaleLayoutId layout;
  MathMode math;
  MatrixShape shape;
  Fill fill;
  uint64_t seed;
};

const FormatInfo& draw_format() {
  RC_ASSERT(kIsSeeded);
  return all_formats()[static_cast<size_t>(
      *rc::gen::inRange(0, static_cast<int>(all_formats().size())))];
}

Drawn draw(const FormatInfo& info, bool finite) {
  std::vector<ScaleLayoutId> layouts;
  for (size_t i = 0; i < info.layouts.size(); ++i) {
    if (info.layouts[i]) layouts.push_back(static_cast<ScaleLayoutId>(i));
  }
  std::vector<Fill> fills;
  for (int i = 0; i < kNumFills; ++i) {
    if (!finite || is_finite(static_cast<Fill>(i))) fills.push_back(static_cast<Fill>(i));
  }
  Drawn drawn{};
  drawn.format = info.id;
  drawn.layout = *rc::gen::elementOf(layouts);
  drawn.math = *rc::gen::element(MathMode::kExact, MathMode::kFast);
  drawn.shape.dtype = *rc::gen::element(DType::kBF16, DType::kF16, DType::kF32);
  drawn.shape.rows = *rc::gen::inRange(0, 40);
  drawn.shape.cols = *rc::gen::inRange(0, 20) * column_multiple(info);
  drawn.shape.gap = *rc::gen::inRange(0, 3);
  drawn.fill = *rc::gen::elementOf(fills);
  drawn.seed = *rc::gen::arbitrary<uint64_t>();
  return drawn;
}

QuantizeTo to(const Drawn& drawn) {
  return {.format = drawn.format, .layout = drawn.layout, .options = {.math = drawn.math}};
}

Matrix data(const Drawn& drawn) { return Matrix::filled(drawn.shape, drawn.fill, drawn.seed); }

// Rows of `input` in the order of `order`.
Matrix gathered(const Matrix& input, const std::vector<int64_t>& order) {
  MatrixShape shape = input.shape();
  shape.batch = 1;
  shape.rows = static_cast<int64_t>(order.size());
  shape.gap = 0;
  Matrix output(shape);
  const auto bytes = static_cast<size_t>(shape.cols * bits(shape.dtype) / 8);
  for (size_t i = 0; i < order.size() && bytes > 0; ++i) {
    std::memcpy(output.row(static_cast<int64_t>(i)), input.row(order[i]), bytes);
  }
  return output;
}

struct RowBytes {
  std::vector<uint8_t> values;
  std::vector<uint8_t> scales;
  bool operator==(const RowBytes&) const = default;
};

// The stored bytes of one row, whatever the layout.
RowBytes row_bytes(const QuantizedTensor& tensor, int64_t row) {
  const QuantizedLayout& layout = tensor.layout;
  const auto value_bytes = tensor.values.size() / std::max<int64_t>(1, layout.rows);
  const auto values = tensor.values.span().subspan(static_cast<size_t>(row * value_bytes),
                                                   static_cast<size_t>(value_bytes));
  RowBytes out{.values = {values.begin(), values.end()}, .scales = {}};
  const int64_t width = bytes(format_info(layout.format).scale_type);
  for (int64_t block = 0; block < layout.scale_blocks; ++block) {
    const int64_t offset =
        scale_offset(layout.scale_layout, row, block, layout.scale_rows, layout.scale_blocks);
    const auto scale = tensor.scales.span().subspan(static_cast<size_t>(offset * width),
                                                    static_cast<size_t>(width));
    out.scales.insert(out.scales.end(), scale.begin(), scale.end());
  }
  return out;
}

// Formats whose rows know nothing of each other once the encode scale is given.
bool has_independent_rows(const FormatInfo& info) { return info.block_rows == 1; }

QuantizeTo to_with_given_scale(const Drawn& drawn) {
  QuantizeTo target = to(drawn);
  if (drawn.format == FormatId::kNvfp4) target.options.encode_scale = 123.5F;
  return target;
}

RC_GTEST_PROP(QuantizeLaws, PermutedRowsGivePermutedOutputs, ()) {
  const FormatInfo& info = draw_format();
  RC_PRE(has_independent_rows(info));
  const Drawn drawn = draw(info, false);
  std::vector<int64_t> order;
  for (int64_t i = 0; i < drawn.shape.rows; ++i)
    order.push_back(*rc::gen::inRange<int64_t>(0, drawn.shape.rows));
  const Matrix input = data(drawn);
  const QuantizedTensor all = quantized(input, to_with_given_scale(drawn));
  const QuantizedTensor some = quantized(gathered(input, order), to_with_given_scale(drawn));
  for (size_t i = 0; i < order.size(); ++i) {
    RC_ASSERT(row_bytes(some, static_cast<int64_t>(i)) == row_bytes(all, order[i]));
  }
}

RC_GTEST_PROP(QuantizeLaws, ARowAloneIsTheRowInTheBatch, ()) {
  const FormatInfo& info = draw_format();
  RC_PRE(has_independent_rows(info));
  Drawn drawn = draw(info, false);
  drawn.shape.rows += 1;
  const int64_t row = *rc::gen::inRange<int64_t>(0, drawn.shape.rows);
  const Matrix input = data(drawn);
  const QuantizedTensor all = quantized(input, to_with_given_scale(drawn));
  const QuantizedTensor one = quantized(gathered(input, {row}), to_with_given_scale(drawn));
  RC_ASSERT(row_bytes(one, 0) == row_bytes(all, row));
}

RC_GTEST_PROP(QuantizeLaws, LayoutsDifferInWhereScalesLieOnly, ()) {
  const FormatInfo& info = draw_format();
  const Drawn drawn = draw(info, false);
  const Matrix input = data(drawn);
  const QuantizedTensor direct = quantized(input, to(drawn));
  QuantizeTo linear = to(drawn);
  linear.layout = ScaleLayoutId::kLinear;
  const QuantizedTensor detour = quantized(input, linear);
  RC_ASSERT(direct.values.copy() == detour.values.copy());
  QuantizedTensor moved(direct.layout);
  relayout(info.id, detour.view.scales, moved.view.scales);
  RC_ASSERT(moved.scales.copy() == direct.scales.copy());
}

RC_GTEST_PROP(QuantizeLaws, TheCallersFloatingPointModeDoesNotMatter, ()) {
  const Drawn drawn = draw(draw_format(), false);
  const Matrix input = data(drawn);
  const QuantizedBytes expected = bytes_of(quantized(input, to(drawn)));
  const unsigned control =
      *rc::gen::element(kFlushToZero, kDenormalsAreZero, kFlushToZero | kDenormalsAreZero,
                        kRoundDown, kRoundUp, kRoundToZero, kRoundToZero | kFlushToZero);
  const ControlWord word(control);
  const unsigned before = ControlWord::now();
  RC_ASSERT(bytes_of(quantized(input, to(drawn))) == expected);
  RC_ASSERT(ControlWord::now() == before);
}

RC_GTEST_PROP(QuantizeLaws, TheCallersFloatingPointModeDoesNotMatterToFusedForms, ()) {
  Drawn drawn = draw(draw_format(), false);
  drawn.shape.dtype = DType::kBF16;
  drawn.shape.cols = 64 * *rc::gen::inRange(1, 5);
  MatrixShape doubled = drawn.shape;
  doubled.cols *= 2;
  const Matrix gate_up = Matrix::filled(doubled, drawn.fill, drawn.seed);
  const Matrix input = data(drawn);
  const Matrix weight = Matrix::filled({.dtype = DType::kBF16, .rows = 1, .cols = drawn.shape.cols},
                                       Fill::kNormal, drawn.seed + 1);
  const TensorView vector = TensorView::contiguous(weight.row(0), DType::kBF16, {drawn.shape.cols});
  const QuantizeOptions options{.math = drawn.math};
  const auto run_all = [&] {
    std::vector<QuantizedBytes> all;
    for (int form = 0; form < 3; ++form) {
      const QuantizedTensor output(quantized_layout(
          drawn.format, drawn.shape.rows, drawn.shape.cols, {.scale_layout = drawn.layout}));
      if (form == 0) silu_mul_quantize(gate_up.view(), output.view, options);
      if (form == 1) smooth_quantize(input.view(), vector, output.view, options);
      if (form == 2) rmsnorm_quantize(input.view(), vector, output.view, {}, options);
      all.push_back(bytes_of(output));
    }
    return all;
  };
  const std::vector<QuantizedBytes> expected = run_all();
  const ControlWord word(
      *rc::gen::element(kFlushToZero | kDenormalsAreZero, kRoundDown, kRoundUp, kRoundToZero));
  RC_ASSERT(run_all() == expected);
}

RC_GTEST_PROP(QuantizeLaws, ThreadsDoNotMatter, ()) {
  Drawn drawn = draw(draw_format(), false);
  // Enough rows that the work is really split.
  drawn.shape.rows *= 20;
  const Matrix input = data(drawn);
  const QuantizedBytes expected = bytes_of(quantized(input, to(drawn)));
  for (const int threads : {1, 2, 3, 8}) {
    const ThreadLimit limit(threads);
    RC_ASSERT(bytes_of(quantized(input, to(drawn))) == expected);
  }
}

// Power-of-two scales: what a code and a scale byte stand for is quantized to that code and byte.
RC_GTEST_PROP(QuantizeLaws, MxRoundTripIsIdempotent, ()) {
  const FormatId format = *rc::gen::element(FormatId::kMxfp4, FormatId::kMxfp8);
  Drawn drawn = draw(format_info(format), true);
  drawn.math = MathMode::kExact;
  const QuantizedTensor once = quantized(data(drawn), to(drawn));
  const Matrix decoded = dequantized(once.view);
  const QuantizedTensor twice = quantized(decoded, to(drawn));
  const Matrix again = dequantized(twice.view);
  // Codes may be expressed with another scale (a block whose maximum rounded down to the next
  // power of two), values may not.
  RC_ASSERT(again.elements() == decoded.elements());
}

RC_GTEST_PROP(QuantizeLaws, MxInputTimesAPowerOfTwoMovesTheScaleBytesOnly, ()) {
  const FormatId format = *rc::gen::element(FormatId::kMxfp4, FormatId::kMxfp8);
  Drawn drawn = draw(format_info(format), true);
  drawn.shape.dtype = DType::kF32;
  drawn.fill = *rc::gen::element(Fill::kQuarterIntegers, Fill::kIntegers, Fill::kNormal);
  const int shift = *rc::gen::inRange(-20, 21);
  QuantizeTo target = to(drawn);
  target.options.mx_scale =
      *rc::gen::element(Ue8m0Rounding::kUp, Ue8m0Rounding::kFloor, Ue8m0Rounding::kEven);
  const Matrix input = data(drawn);
  // Data of ordinary size: far from both ends of the scales.
  for (int64_t row = 0; row < drawn.shape.rows; ++row) {
    for (int64_t col = 0; col < drawn.shape.cols; ++col) {
      const float x = std::abs(input.at(row, col));
      if (x != 0.0F && (x < 0x1p-60F || x > 0x1p60F)) input.set(row, col, 1.0F);
    }
  }
  const Matrix scaled(drawn.shape);
  for (int64_t row = 0; row < drawn.shape.rows; ++row) {
    for (int64_t col = 0; col < drawn.shape.cols; ++col) {
      scaled.set(row, col, std::ldexp(input.at(row, col), shift));
    }
  }
  const QuantizedTensor a = quantized(input, target);
  const QuantizedTensor b = quantized(scaled, target);
  RC_ASSERT(a.values.copy() == b.values.copy());
  for (size_t i = 0; i < a.scales.span().size(); ++i) {
    const int from = a.scales.span()[i];
    RC_ASSERT(b.scales.span()[i] == (from == 0 ? 0 : from + shift));
  }
}

// NVFP4 with encode scale 1: a block that holds the code 6 and a normal E4M3 scale comes back.
RC_GTEST_PROP(QuantizeLaws, DecodedNvfp4BlocksWithASixSurvive, ()) {
  Random random(*rc::gen::arbitrary<uint64_t>());
  const int64_t rows = *rc::gen::inRange(1, 20);
  const int64_t cols = 16 * *rc::gen::inRange(1, 10);
  QuantizedTensor tensor(
      quantized_layout(FormatId::kNvfp4, rows, cols, {.scale_layout = ScaleLayoutId::kLinear}));
  for (uint8_t& byte : tensor.values.span()) byte = static_cast<uint8_t>(random.bits());
  // The code of a negative zero stays, too.
  for (size_t i = 0; i < tensor.values.span().size(); i += 8) tensor.values.span()[i] |= 0x7;
  for (uint8_t& byte : tensor.scales.span()) byte = static_cast<uint8_t>(random.range(8, 126));
  tensor.global_scale.data<float>()[0] = 1.0F;
  const Matrix decoded = dequantized(tensor.view);
  const QuantizedTensor again = quantized(decoded, {.format = FormatId::kNvfp4,
                                                    .layout = ScaleLayoutId::kLinear,
                                                    .options = {.encode_scale = 1.0F}});
  RC_ASSERT(bytes_of(again) == bytes_of(tensor));
}

RC_GTEST_PROP(QuantizeLaws, BatchesAreIndependentGivenTheEncodeScale, ()) {
  const FormatInfo& info = draw_format();
  Drawn drawn = draw(info, false);
  drawn.shape.batch = *rc::gen::inRange(1, 4);
  drawn.shape.gap = 0;
  const Matrix input = data(drawn);
  const QuantizedTensor all = quantized(input, to_with_given_scale(drawn));
  const int64_t rows = drawn.shape.rows;
  for (int64_t batch = 0; batch < drawn.shape.batch; ++batch) {
    std::vector<int64_t> order;
    for (int64_t i = 0; i < rows; ++i) order.push_back(batch * rows + i);
    const QuantizedTensor alone = quantized(gathered(input, order), to_with_given_scale(drawn));
    const auto part = [&](const GuardedBuffer& whole, const GuardedBuffer& expected) {
      const auto bytes = static_cast<size_t>(expected.size());
      const auto span = whole.span().subspan(static_cast<size_t>(batch) * bytes, bytes);
      return std::vector<uint8_t>(span.begin(), span.end()) == expected.copy();
    };
    RC_ASSERT(part(all.values, alone.values));
    RC_ASSERT(part(all.scales, alone.scales));
  }
}

}  // namespace
}  // namespace narrowfloat::testing
