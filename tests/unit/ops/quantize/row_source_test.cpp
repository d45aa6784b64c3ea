// A fused quantizer equals its composition (spec 1.3): the 16-bit tensor that the unfused operation
// would store, made here by the plain model, then quantize(). In every format, layout, mode and
// input type.
#include <functional>

#include <gtest/gtest.h>

#include "support/tensors.h"
#include "tensor/block_math.h"
#include "unit/ops/quantize/plain_model.h"

namespace narrowfloat::testing {
namespace {

struct Setting {
  FormatId format;
  ScaleLayoutId layout;
  MathMode math;
  DType dtype;
  MatrixShape shape;
  Fill fill;
  uint64_t seed;
};

QuantizeTo to(const Setting& setting) {
  return {.format = setting.format, .layout = setting.layout, .options = {.math = setting.math}};
}

QuantizedTensor empty_output(const Setting& setting) {
  return QuantizedTensor(quantized_layout(setting.format, setting.shape.rows, setting.shape.cols,
                                          {.scale_layout = setting.layout}));
}

// Calls body for settings of all formats, layouts, modes and types, with several shapes and fills.
void for_settings(const std::function<void(const Setting&)>& body) {
  Random random(11);
  for (const FormatInfo& info : all_formats()) {
    for (size_t layout = 0; layout < info.layouts.size(); ++layout) {
      if (!info.layouts[layout]) continue;
      for (int variant = 0; variant < 24; ++variant) {
        Setting s{.format = info.id,
                  .layout = static_cast<ScaleLayoutId>(layout),
                  .math = variant % 2 == 0 ? MathMode::kExact : MathMode::kFast,
                  .dtype = variant / 2 % 2 == 0 ? DType::kBF16 : DType::kF16,
                  .shape = {},
                  .fill = Fill::kNormal,
                  .seed = random.bits()};
        s.fill = random.pick({Fill::kNormal, Fill::kNormal, Fill::kNormalRows, Fill::kSpecials,
                              Fill::kQuarterIntegers, Fill::kSparse, Fill::kDenormals});
        s.shape = {.dtype = s.dtype,
                   .rows = random.range(0, 9),
                   .cols = random.pick<int64_t>({64, 96, 128, 160, 192, 320, 576}),
                   .gap = random.range(0, 2)};
        SCOPED_TRACE(std::string(info.name) + " " + std::string(name(s.layout)) + " " +
                     std::string(name(s.math)) + " " + std::string(name(s.fill)) + " " +
                     std::to_string(s.shape.rows) + "x" + std::to_string(s.shape.cols));
        body(s);
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

void expect_equal(const QuantizedTensor& fused, const QuantizedTensor& composed) {
  EXPECT_EQ(fused.values.copy(), composed.values.copy());
  EXPECT_EQ(fused.scales.copy(), composed.scales.copy());
  EXPECT_EQ(fused.global_scale.copy(), composed.global_scale.copy());
  EXPECT_TRUE(fused.intact());
}

std::vector<float> row_of(const Matrix& matrix, int64_t row) {
  std::vector<float> values(static_cast<size_t>(matrix.shape().cols));
  for (size_t i = 0; i < values.size(); ++i) values[i] = matrix.at(row, static_cast<int64_t>(i));
  return values;
}

// Weights with zeros of both signs among them.
Matrix weights(const Setting& setting) {
  const MatrixShape shape{.dtype = setting.dtype, .rows = 1, .cols = setting.shape.cols};
  Matrix matrix = Matrix::filled(shape, Fill::kNormal, setting.seed + 1);
  matrix.set(0, 3, -0.0F);
  matrix.set(0, 5, 0.0F);
  return matrix;
}

TensorView vector_view(const Matrix& matrix) {
  return TensorView::contiguous(matrix.row(0), matrix.shape().dtype, {matrix.shape().cols});
}

// y = RN16(RN(RN(h * rs) * w)) of every row.
Matrix normalised(const Matrix& h, const Matrix& weight, float eps) {
  MatrixShape shape = h.shape();
  shape.gap = 0;
  Matrix y(shape);
  for (int64_t row = 0; row < shape.rows; ++row) {
    const float rs = model_reciprocal_rms(row_of(h, row), eps);
    for (int64_t col = 0; col < shape.cols; ++col) {
      const float scaled = h.at(row, col) * rs;
      y.set(row, col, scaled * (0.0F + weight.at(0, col)));
    }
  }
  return y;
}

TEST(FusedQuantize, SiluMulEqualsItsComposition) {
  for_settings([](const Setting& s) {
    MatrixShape doubled = s.shape;
    doubled.cols *= 2;
    const Matrix input = Matrix::filled(doubled, s.fill, s.seed);
    const Matrix y(s.shape);
    for (int64_t row = 0; row < s.shape.rows; ++row) {
      for (int64_t col = 0; col < s.shape.cols; ++col) {
        y.set(row, col,
              model_silu_mul(input.at(row, col), input.at(row, s.shape.cols + col), s.math));
      }
    }
    const QuantizedTensor fused = empty_output(s);
    silu_mul_quantize(input.view(), fused.view, to(s).options);
    expect_equal(fused, quantized(y, to(s)));
  });
}

TEST(FusedQuantize, SmoothEqualsItsComposition) {
  for_settings([](const Setting& setting) {
    Setting s = setting;
    s.dtype = DType::kBF16;
    s.shape.dtype = s.dtype;
    const Matrix input = Matrix::filled(s.shape, s.fill, s.seed);
    const Matrix smooth = weights(s);
    const Matrix y(s.shape);
    for (int64_t row = 0; row < s.shape.rows; ++row) {
      for (int64_t col = 0; col < s.shape.cols; ++col) {
        y.set(row, col, input.at(row, col) * smooth.at(0, col));
      }
    }
    const QuantizedTensor fused = empty_output(s);
    smooth_quantize(input.view(), vector_view(smooth), fused.view, to(s).options);
    expect_equal(fused, quantized(y, to(s)));
  });
}

TEST(FusedQuantize, RmsNormEqualsItsComposition) {
  for_settings([](const Setting& s) {
    const Matrix input = Matrix::filled(s.shape, s.fill, s.seed);
    const Matrix weight = weights(s);
    const Matrix y = normalised(input, weight, 1e-5F);
    const QuantizedTensor fused = empty_output(s);
    MatrixShape dense = s.shape;
    dense.gap = 0;
    const Matrix norm_output(dense);
    rmsnorm_quantize(input.view(), vector_view(weight), fused.view,
                     {.eps = 1e-5F, .norm_output = norm_output.view()}, to(s).options);
    expect_equal(fused, quantized(y, to(s)));
    EXPECT_EQ(norm_output.elements(), y.elements());
    // Without norm_output: the same.
    const QuantizedTensor alone = empty_output(s);
    rmsnorm_quantize(input.view(), vector_view(weight), alone.view, {.eps = 1e-5F}, to(s).options);
    expect_equal(alone, fused);
  });
}

TEST(FusedQuantize, AddRmsNormEqualsItsCompositionAndAddsOnce) {
  for_settings([](const Setting& s) {
    const Matrix input = Matrix::filled(s.shape, s.fill, s.seed);
    const Matrix residual = Matrix::filled(s.shape, Fill::kNormal, s.seed + 7);
    const Matrix weight = weights(s);
    const Matrix h(s.shape);
    for (int64_t row = 0; row < s.shape.rows; ++row) {
      for (int64_t col = 0; col < s.shape.cols; ++col) {
        h.set(row, col, input.at(row, col) + residual.at(row, col));
      }
    }
    const Matrix y = normalised(h, weight, 1e-6F);
    const QuantizedTensor fused = empty_output(s);
    MatrixShape dense = s.shape;
    dense.gap = 0;
    const Matrix norm_output(dense);
    add_rmsnorm_quantize(input.view(), residual.view(), vector_view(weight), fused.view,
                         {.norm_output = norm_output.view()}, to(s).options);
    expect_equal(fused, quantized(y, to(s)));
    EXPECT_EQ(residual.elements(), h.elements());
    EXPECT_EQ(norm_output.elements(), y.elements());
  });
}

TEST(FusedQuantize, ExtraScalesAreTheScalesInAnotherLayout) {
  for_settings([](const Setting& s) {
    const Matrix input = Matrix::filled(s.shape, s.fill, s.seed);
    const Matrix weight = weights(s);
    const FormatInfo& info = format_info(s.format);
    for (size_t i = 0; i < info.layouts.size(); ++i) {
      if (!info.layouts[i]) continue;
      const QuantizedTensor fused = empty_output(s);
      Setting other = s;
      other.layout = static_cast<ScaleLayoutId>(i);
      const QuantizedTensor extra = empty_output(other);
      rmsnorm_quantize(input.view(), vector_view(weight), fused.view,
                       {.extra_scales = extra.view.scales}, to(s).options);
      const QuantizedTensor moved = empty_output(other);
      relayout(s.format, fused.view.scales, moved.view.scales);
      EXPECT_EQ(extra.scales.copy(), moved.scales.copy()) << name(other.layout);
    }
  });
}

TEST(FusedQuantize, ExtraScalesOfGroupsLieInTheGroupsRows) {
  const Matrix input =
      Matrix::filled({.dtype = DType::kBF16, .rows = 50, .cols = 256}, Fill::kNormal, 3);
  const Matrix weight =
      Matrix::filled({.dtype = DType::kBF16, .rows = 1, .cols = 256}, Fill::kNormal, 4);
  const Vector offsets = Vector::of<int64_t>(DType::kI64, {0, 7, 7, 50});
  QuantizedLayout layout = quantized_layout(FormatId::kFp8Block1x128, 50, 256, {.groups = 3});
  const QuantizedTensor output(layout);
  layout.scale_layout = ScaleLayoutId::kLinear;
  layout.scale_count = layout.scale_rows * layout.scale_blocks;
  layout.scales_bytes = layout.scale_count * 4;
  const QuantizedTensor extra(layout);
  const QuantizedTensor moved(layout);
  QuantizeOptions options;
  options.row_offsets = offsets.view();
  rmsnorm_quantize(input.view(), vector_view(weight), output.view,
                   {.extra_scales = extra.view.scales}, options);
  relayout(FormatId::kFp8Block1x128, output.view.scales, moved.view.scales);
  EXPECT_EQ(extra.scales.copy(), moved.scales.copy());
}

// All 2^16 gates: the exponential's ends, denormals and NaN included. Each is the one element of
// its row, whose FP8 scale shows y to the last bit.
TEST(FusedQuantize, SiluOfEveryGate) {
  constexpr int64_t kRows = 65536;
  Random random(5);
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (int pass = 0; pass < 6; ++pass) {
      const MathMode math = pass % 2 == 0 ? MathMode::kExact : MathMode::kFast;
      const Matrix input({.dtype = dtype, .rows = kRows, .cols = 32}, {.poison = 0});
      const Matrix y({.dtype = dtype, .rows = kRows, .cols = 16}, {.poison = 0});
      for (int64_t row = 0; row < kRows; ++row) {
        store_element(dtype, static_cast<uint32_t>(row), 0, input.row(row));
        input.set(row, 16, pass < 2 ? 1.0F : random.normal());
        y.set(row, 0, model_silu_mul(input.at(row, 0), input.at(row, 16), math));
      }
      // Rule reciprocal_pow2 hides bits and reciprocal has a fast form that flushes.
      const QuantizeTo target{
          .format = FormatId::kFp8Block1x128,
          .options = {
              .math = math, .fp8_rule = Fp8ScaleRule::kAmaxDiv, .fp8_eps = 448.0F * 0x1p-126F}};
      const QuantizedTensor composed = quantized(y, target);
      const QuantizedTensor fused(composed.layout);
      silu_mul_quantize(input.view(), fused.view, target.options);
      EXPECT_EQ(bytes_of(fused), bytes_of(composed)) << name(dtype) << " " << name(math);
    }
  }
}

}  // namespace
}  // namespace narrowfloat::testing
