// Quantization and scale layouts of the C API.
#include <algorithm>
#include <cstddef>

#include "c_api/boundary.h"
#include "narrowfloat/format.h"
#include "narrowfloat/quantize.h"

namespace narrowfloat::c_api {

namespace {

QuantizedLayout layout_of(std::string_view argument, const NfQuantized& given) {
  if (given.format == nullptr) throw_invalid(argument, "expected a format, got NULL");
  QuantizedLayoutOptions options;
  if (given.layout != nullptr) options.scale_layout = parse_scale_layout(given.layout);
  if (given.batch != 0) options.batch = given.batch;
  if (given.alignment != 0) options.alignment = given.alignment;
  return quantized_layout(parse_format(given.format), given.rows, given.cols, options);
}

QuantizedView view_of(std::string_view argument, const NfQuantized* quantized) {
  const NfQuantized given = read_struct(argument, quantized);
  return layout_of(argument, given)
      .bind(given.values, given.scales, given.global_scale, to_device(argument, given.device));
}

QuantizeOptions options_of(const NfQuantizeOptions* given) {
  const NfQuantizeOptions options = read_optional("options", given);
  QuantizeOptions result;
  if (options.math != nullptr) result.math = parse_math_mode(options.math);
  if (options.mx_scale != nullptr) result.mx_scale = parse_ue8m0_rounding(options.mx_scale);
  if (options.encode_scale != 0) result.encode_scale = options.encode_scale;
  return result;
}

TensorView tensor_of(std::string_view argument, const NfTensor* tensor) {
  require_given(argument, tensor);
  return to_view(argument, *tensor);
}

}  // namespace

}  // namespace narrowfloat::c_api

namespace nf = narrowfloat;

int32_t nf_quantized_sizes(NfQuantized* quantized) {
  return nf::c_api::guarded([&] {
    const NfQuantized given = nf::c_api::read_struct("quantized", quantized);
    const nf::QuantizedLayout layout = nf::c_api::layout_of("quantized", given);
    quantized->layout = nf::name(layout.scale_layout).data();
    quantized->value_cols = layout.value_cols;
    quantized->values_bytes = layout.values_bytes;
    quantized->scales_bytes = layout.scales_bytes;
    quantized->global_scales = layout.global_scales;
  });
}

int32_t nf_quantize(const NfTensor* input, const NfQuantized* output,
                    const NfQuantizeOptions* options, void* stream) {
  return nf::c_api::guarded([&] {
    nf::quantize(nf::c_api::tensor_of("input", input), nf::c_api::view_of("output", output),
                 nf::c_api::options_of(options), nf::c_api::to_stream(stream));
  });
}

int32_t nf_dequantize(const NfQuantized* input, const NfTensor* output, void* stream) {
  return nf::c_api::guarded([&] {
    nf::dequantize(nf::c_api::view_of("input", input), nf::c_api::tensor_of("output", output), {},
                   nf::c_api::to_stream(stream));
  });
}

int32_t nf_relayout(const NfQuantized* input, const NfQuantized* output, void* stream) {
  return nf::c_api::guarded([&] {
    const nf::QuantizedView from = nf::c_api::view_of("input", input);
    const nf::QuantizedView to = nf::c_api::view_of("output", output);
    if (from.format != to.format) {
      nf::c_api::throw_invalid("output", "expected the input's format, " +
                                             std::string(nf::name(from.format)) + ", got " +
                                             std::string(nf::name(to.format)));
    }
    nf::relayout(from.format, from.scales, to.scales, nf::c_api::to_stream(stream));
  });
}
