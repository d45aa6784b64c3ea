// See quantize_call.h.
#include "conformance/quantize_call.h"

#include <algorithm>

namespace narrowfloat::testing {
namespace {

Vector row_vector(const QuantizeCase& c, const BufferStyle& style) {
  Vector vector(c.dtype, c.cols, style);
  Random random(c.seed + 2);
  const Fill fill = random.chance(80) ? Fill::kNormal : Fill::kSpecials;
  fill_elements(fill, c.dtype, random, c.cols, vector.buffer().data());
  return vector;
}

BufferStyle input_style(const QuantizeCase& c, const RunStyle& style) {
  return {.poison = style.poison, .guard = style.guard, .misalignment = c.misalignment};
}

QuantizeOptions options_of(const QuantizeCase& c, const QuantizeBuffers& b,
                           const DeviceCopies& device) {
  QuantizeOptions options;
  options.math = c.math;
  options.encode_scale = c.encode_scale;
  if (!c.encode_scales.empty()) options.encode_scales = device.view(b.encode_scales.view());
  options.four_over_six = c.four_over_six;
  if (c.is_base_a_tensor) {
    options.base_decode_scales = device.view(b.base_decode_scales.view());
  } else {
    options.base_decode_scale = c.base_decode_scale;
  }
  if (c.row_list) options.row_list = device.view(b.row_list.view());
  options.mx_scale = c.mx_scale;
  options.fp8_rule = c.fp8_rule;
  options.fp8_eps = c.fp8_eps;
  options.fp8_decode_scale = c.fp8_decode_scale;
  if (c.valid_rows) options.valid_rows = device.view(b.valid_rows.view());
  if (!c.row_offsets.empty()) options.row_offsets = device.view(b.row_offsets.view());
  return options;
}

}  // namespace

Buffers QuantizeBuffers::inputs() const {
  return {&input.buffer(),         &vector.buffer(),
          &encode_scales.buffer(), &base_decode_scales.buffer(),
          &row_list.buffer(),      &valid_rows.buffer(),
          &row_offsets.buffer()};
}

Buffers QuantizeBuffers::outputs() const {
  return {&output.values, &output.scales,        &output.global_scale,
          &extra.scales,  &norm_output.buffer(), &residual.buffer()};
}

bool QuantizeBuffers::intact() const {
  const auto stands = [](const GuardedBuffer* buffer) { return buffer->intact(); };
  return std::ranges::all_of(inputs(), stands) && std::ranges::all_of(outputs(), stands);
}

QuantizeBuffers make_buffers(const QuantizeCase& c, const RunStyle& style) {
  const BufferStyle plain{.poison = style.poison, .guard = style.guard};
  const BufferStyle shifted = input_style(c, style);
  const MatrixShape shape{.dtype = c.dtype, .batch = c.batch, .rows = c.rows, .cols = c.cols};
  QuantizeBuffers b;
  MatrixShape input = shape;
  input.cols = c.input_cols();
  input.gap = device_gap(c.gap);
  b.input = Matrix::filled(input, c.fill, c.seed + 1, shifted);
  if (c.source != RowSourceKind::kPlain && c.source != RowSourceKind::kSiluMul) {
    b.vector = row_vector(c, plain);
  }
  if (c.source == RowSourceKind::kAddRmsNorm) {
    MatrixShape residual = shape;
    residual.gap = device_gap(c.gap * 2);
    b.residual = Matrix::filled(residual, Fill::kNormal, c.seed + 3, shifted);
  }
  b.encode_scales = Vector::of(DType::kF32, c.encode_scales, plain);
  if (c.is_base_a_tensor) {
    b.base_decode_scales = Vector::of(DType::kF32, std::vector{*c.base_decode_scale}, plain);
  }
  if (c.row_list) b.row_list = Vector::of(DType::kI32, *c.row_list, plain);
  if (c.valid_rows) b.valid_rows = Vector::of(DType::kI32, *c.valid_rows, plain);
  b.row_offsets = Vector::of(DType::kI64, c.row_offsets, plain);
  const QuantizedLayout layout = layout_of(c);
  b.output = QuantizedTensor(layout, shifted, c.num_global_scales());
  if (c.extra_layout) {
    QuantizedLayout extra = layout;
    extra.scale_layout = *c.extra_layout;
    extra.scale_count =
        c.batch * scale_image_size(extra.scale_layout, extra.scale_rows, extra.scale_blocks);
    extra.scales_bytes = extra.scale_count * bytes(format_info(c.format).scale_type);
    extra.values_bytes = 0;
    b.extra = QuantizedTensor(extra, shifted);
  }
  if (c.has_norm_output) b.norm_output = Matrix(shape, shifted);
  return b;
}

void queue_quantize(const QuantizeCase& c, const QuantizeBuffers& b, const DeviceCopies& device,
                    Stream stream) {
  const QuantizeOptions options = options_of(c, b, device);
  RmsNormOptions norm{.eps = c.norm_eps};
  if (c.has_norm_output) norm.norm_output = device.view(b.norm_output.view());
  if (c.extra_layout) norm.extra_scales = device.view(b.extra.view.scales);
  const TensorView input = device.view(b.input.view(c.input_rank));
  const TensorView vector = device.view(b.vector.view());
  const QuantizedView output = device.view(b.output.view);
  switch (c.source) {
    case RowSourceKind::kPlain:
      return quantize(input, output, options, stream);
    case RowSourceKind::kSiluMul:
      return silu_mul_quantize(input, output, options, stream);
    case RowSourceKind::kSmooth:
      return smooth_quantize(input, vector, output, options, stream);
    case RowSourceKind::kRmsNorm:
      return rmsnorm_quantize(input, vector, output, norm, options, stream);
    case RowSourceKind::kAddRmsNorm:
      return add_rmsnorm_quantize(input, device.view(b.residual.view()), vector, output, norm,
                                  options, stream);
  }
}

QuantizedLayout layout_of(const QuantizeCase& c) {
  const int64_t groups = c.row_offsets.empty() ? 0 : static_cast<int64_t>(c.row_offsets.size()) - 1;
  return quantized_layout(
      c.format, c.rows, c.cols,
      {.scale_layout = c.layout, .batch = c.batch, .alignment = c.alignment, .groups = groups});
}

Matrix input_of(const QuantizeCase& c) {
  return Matrix::filled(
      {.dtype = c.dtype, .batch = c.batch, .rows = c.rows, .cols = c.input_cols()}, c.fill,
      c.seed + 1);
}

}  // namespace narrowfloat::testing
