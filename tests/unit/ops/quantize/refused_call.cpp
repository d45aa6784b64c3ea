// See refused_call.h.
#include "unit/ops/quantize/refused_call.h"

#include "support/expect_error.h"

namespace narrowfloat::testing {

void call(const QuantizeCall& c) {
  switch (c.source) {
    case RowSourceKind::kPlain:
      return quantize(c.input, c.output, c.options);
    case RowSourceKind::kSiluMul:
      return silu_mul_quantize(c.input, c.output, c.options);
    case RowSourceKind::kSmooth:
      return smooth_quantize(c.input, c.vector, c.output, c.options);
    case RowSourceKind::kRmsNorm:
      return rmsnorm_quantize(c.input, c.vector, c.output, c.norm, c.options);
    case RowSourceKind::kAddRmsNorm:
      return add_rmsnorm_quantize(c.input, c.residual, c.vector, c.output, c.norm, c.options);
  }
}

Working::Working(FormatId format, RowSourceKind source) {
  const bool has_rows_only =
      format == FormatId::kFp8Block1x128 || format == FormatId::kNvfp4PerToken;
  const MatrixShape shape{
      .dtype = DType::kBF16, .batch = has_rows_only ? 1 : 2, .rows = kCallRows, .cols = kCallCols};
  MatrixShape in = shape;
  in.cols *= source == RowSourceKind::kSiluMul ? 2 : 1;
  input = Matrix::filled(in, Fill::kNormal, 1);
  residual = Matrix::filled(shape, Fill::kNormal, 2);
  vector = Matrix::filled({.dtype = DType::kBF16, .rows = 1, .cols = kCallCols}, Fill::kNormal, 3);
  norm_output = Matrix(shape);
  const auto layout = quantized_layout(format, kCallRows, kCallCols, {.batch = shape.batch});
  output = QuantizedTensor(layout);
  extra = QuantizedTensor(layout);
  for (float& scale : scales.buffer().span<float>()) scale = 1.0F;
  call.source = source;
  call.input = input.view(3);
  call.vector = TensorView::contiguous(vector.row(0), DType::kBF16, {kCallCols});
  call.residual = residual.view(3);
  call.output = output.view;
}

void expect_refused(const Violation& violation) {
  const Working working(violation.format, violation.source);
  QuantizeCall broken = working.call;
  const auto before = working.outputs();
  violation.apply(broken, working);
  expect_error(ErrorKind::kInvalidArgument, violation.fragments, [&] { call(broken); });
  EXPECT_EQ(before, working.outputs());
  // The same call without the violation works: it is what is refused.
  EXPECT_NO_THROW(call(working.call));
}

}  // namespace narrowfloat::testing
