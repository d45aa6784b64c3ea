// See quantize_run.h.
#include "conformance/quantize_run.h"

#include <algorithm>
#include <cstring>

#include "conformance/coverage.h"
#include "narrowfloat/error.h"
#include "support/device_copies.h"
#include "support/environment.h"

namespace narrowfloat::testing {
namespace {

// All buffers of a call.
struct Buffers {
  Matrix input;
  Matrix residual;
  Vector vector;
  Vector encode_scales;
  Vector row_list;
  Vector valid_rows;
  Vector row_offsets;
  QuantizedTensor output;
  QuantizedTensor extra;  // Only its scales.
  Matrix norm_output;
};

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

Buffers make_buffers(const QuantizeCase& c, const RunStyle& style) {
  const BufferStyle plain{.poison = style.poison, .guard = style.guard};
  const BufferStyle shifted = input_style(c, style);
  const MatrixShape shape{.dtype = c.dtype, .batch = c.batch, .rows = c.rows, .cols = c.cols};
  Buffers b;
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
  b.encode_scales = Vector::of(DType::kF32, c.encode_scales);
  if (c.row_list) b.row_list = Vector::of(DType::kI32, *c.row_list);
  if (c.valid_rows) b.valid_rows = Vector::of(DType::kI32, *c.valid_rows);
  b.row_offsets = Vector::of(DType::kI64, c.row_offsets);
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

QuantizeOptions options_of(const QuantizeCase& c, const Buffers& b, const DeviceCopies& device) {
  QuantizeOptions options;
  options.math = c.math;
  options.encode_scale = c.encode_scale;
  if (!c.encode_scales.empty()) options.encode_scales = device.view(b.encode_scales.view());
  options.four_over_six = c.four_over_six;
  options.base_decode_scale = c.base_decode_scale;
  if (c.row_list) options.row_list = device.view(b.row_list.view());
  options.mx_scale = c.mx_scale;
  options.fp8_rule = c.fp8_rule;
  options.fp8_eps = c.fp8_eps;
  options.fp8_decode_scale = c.fp8_decode_scale;
  if (c.valid_rows) options.valid_rows = device.view(b.valid_rows.view());
  if (!c.row_offsets.empty()) options.row_offsets = device.view(b.row_offsets.view());
  return options;
}

void call(const QuantizeCase& c, const Buffers& b, const DeviceCopies& device) {
  const QuantizeOptions options = options_of(c, b, device);
  RmsNormOptions norm{.eps = c.norm_eps};
  if (c.has_norm_output) norm.norm_output = device.view(b.norm_output.view());
  if (c.extra_layout) norm.extra_scales = device.view(b.extra.view.scales);
  const TensorView input = device.view(b.input.view(c.input_rank));
  const TensorView vector = device.view(b.vector.view());
  const QuantizedView output = device.view(b.output.view);
  const Stream stream = device.stream();
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

// All that a call may touch.
DeviceCopies copies_of(const Buffers& b, const DeviceCopyStyle& style) {
  return {{&b.input.buffer(), &b.residual.buffer(), &b.vector.buffer(), &b.encode_scales.buffer(),
           &b.row_list.buffer(), &b.valid_rows.buffer(), &b.row_offsets.buffer(), &b.output.values,
           &b.output.scales, &b.output.global_scale, &b.extra.values, &b.extra.scales,
           &b.norm_output.buffer()},
          style};
}

bool all_intact(const Buffers& b) {
  return b.input.buffer().intact() && b.residual.buffer().intact() && b.vector.buffer().intact() &&
         b.output.intact() && b.extra.intact() && b.norm_output.buffer().intact();
}

// The outputs as one sequence of bytes.
std::vector<uint8_t> all_outputs(const Buffers& b) {
  std::vector<uint8_t> all;
  for (const GuardedBuffer* buffer :
       {&b.output.values, &b.output.scales, &b.output.global_scale, &b.extra.scales,
        &b.norm_output.buffer(), &b.residual.buffer()}) {
    const std::vector<uint8_t> copy = buffer->copy();
    all.insert(all.end(), copy.begin(), copy.end());
  }
  return all;
}

}  // namespace

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

std::optional<QuantizeOutput> run_quantize(const QuantizeCase& c, std::string_view implementation,
                                           const RunStyle& style, std::string* refusal) {
  const Buffers b = make_buffers(c, style);
  // Rows that do not count hold whatever a previous batch left there. (A norm reads them all: it
  // updates the residual and norm_output of every row.)
  for (int64_t i = 0; i < b.input.num_rows() && !c.is_norm(); ++i) {
    if (!c.is_visited(i / c.rows, i % c.rows)) b.input.poison_row(i, style.poison);
  }
  const std::vector<uint8_t> input = b.input.buffer().copy();
  const std::vector<uint8_t> vector = b.vector.buffer().copy();
  const std::vector<uint8_t> before = all_outputs(b);
  const ForcedImplementation forced("quantize", implementation);
  const DeviceCopies device = copies_of(b, {.on_host = !is_for_device(implementation),
                                            .programmatic_launch = style.guard == Guard::kPage});
  bool canaries_intact = false;
  try {
    call(c, b, device);
    canaries_intact = device.take_back();
  } catch (const Error& error) {
    canaries_intact = device.take_back();
    if (error.kind() != ErrorKind::kUnsupported || before != all_outputs(b)) throw;
    if (refusal != nullptr) *refusal = error.what();
    return std::nullopt;
  }
  QuantizeOutput output{.tensor = bytes_of(b.output),
                        .extra_scales = b.extra.scales.copy(),
                        .norm_output = b.norm_output.elements(),
                        .residual = b.residual.elements()};
  output.canaries_intact = canaries_intact && all_intact(b);
  output.inputs_unchanged = input == b.input.buffer().copy() && vector == b.vector.buffer().copy();
  return output;
}

}  // namespace narrowfloat::testing
