// The operations. Arrays become views while the interpreter is locked; the library then runs
// without the lock, so that other Python threads go on.
#include <string>
#include <string_view>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>

#include "narrowfloat/error.h"
#include "narrowfloat/quantize.h"
#include "python/src/arrays.h"
#include "python/src/bindings.h"
#include "python/src/buffers.h"
#include "python/src/choices.h"
#include "python/src/options.h"
#include "python/src/streams.h"

namespace narrowfloat::python {
namespace {

using nb::literals::operator""_a;
using Options = PythonQuantizeOptions;

void run_quantize(nb::handle input, const QuantizedBuffers& output, const Options& options) {
  const Array array = input_array("input", input);
  const QuantizedView& view = output.output();
  const Stream stream = current_stream(array);
  const nb::gil_scoped_release unlocked;
  quantize(array.view, view, options.options, stream);
}

// Calls as a C++ program makes them: bench/call_overhead.py compares those from Python with them.
void repeat_quantize(nb::handle input, const QuantizedBuffers& output, const Options& options,
                     int64_t count) {
  const Array array = input_array("input", input);
  const QuantizedView& view = output.output();
  const Stream stream = current_stream(array);
  const nb::gil_scoped_release unlocked;
  for (int64_t i = 0; i < count; ++i) quantize(array.view, view, options.options, stream);
}

void run_silu_mul_quantize(nb::handle gate_up, const QuantizedBuffers& output,
                           const Options& options) {
  const Array array = input_array("gate_up", gate_up);
  const QuantizedView& view = output.output();
  const Stream stream = current_stream(array);
  const nb::gil_scoped_release unlocked;
  silu_mul_quantize(array.view, view, options.options, stream);
}

void run_smooth_quantize(nb::handle input, nb::handle smooth, const QuantizedBuffers& output,
                         const Options& options) {
  const Array array = input_array("input", input);
  const Array factors = input_array("smooth", smooth);
  const QuantizedView& view = output.output();
  const Stream stream = current_stream(array);
  const nb::gil_scoped_release unlocked;
  smooth_quantize(array.view, factors.view, view, options.options, stream);
}

void run_rmsnorm_quantize(nb::handle input, nb::handle weight, const QuantizedBuffers& output,
                          const PythonRmsNormOptions& norm, const Options& options) {
  const Array array = input_array("input", input);
  const Array factors = input_array("weight", weight);
  const QuantizedView& view = output.output();
  const Stream stream = current_stream(array);
  const nb::gil_scoped_release unlocked;
  rmsnorm_quantize(array.view, factors.view, view, norm.options, options.options, stream);
}

void run_add_rmsnorm_quantize(nb::handle input, nb::handle residual, nb::handle weight,
                              const QuantizedBuffers& output, const PythonRmsNormOptions& norm,
                              const Options& options) {
  const Array array = input_array("input", input);
  const Array sum = output_array("residual", residual);
  const Array factors = input_array("weight", weight);
  const QuantizedView& view = output.output();
  const Stream stream = current_stream(array);
  const nb::gil_scoped_release unlocked;
  add_rmsnorm_quantize(array.view, sum.view, factors.view, view, norm.options, options.options,
                       stream);
}

void run_dequantize(const QuantizedBuffers& input, nb::handle output, bool global_scale_divides,
                    nb::handle row_offsets) {
  const Array array = output_array("out", output);
  const Array offsets = input_array("row_offsets", row_offsets);
  const DequantizeOptions options{.global_scale_divides = global_scale_divides,
                                  .row_offsets = offsets.view};
  const Stream stream = current_stream(array);
  const nb::gil_scoped_release unlocked;
  dequantize(input.view, array.view, options, stream);
}

void run_relayout(const QuantizedBuffers& input, const QuantizedLayout& layout, nb::handle output) {
  if (input.layout.format != layout.format) {
    throw Error(ErrorKind::kInvalidArgument,
                "out: its format is " + std::string(name(layout.format)) + ", the input's " +
                    std::string(name(input.layout.format)));
  }
  const Array array = output_array("out", output);
  const ScaleView scales = scale_view(layout, "out", array);
  const Stream stream = current_stream(array);
  const nb::gil_scoped_release unlocked;
  relayout(layout.format, input.view.scales, scales, stream);
}

// Scales that no tensor is at hand for.
void run_relayout_scales(const QuantizedLayout& from, nb::handle scales, const QuantizedLayout& to,
                         nb::handle output) {
  const Array array = input_array("scales", scales);
  const Array target = output_array("out", output);
  const ScaleView source = scale_view(from, "scales", array);
  const ScaleView moved = scale_view(to, "out", target);
  const Stream stream = current_stream(array);
  const nb::gil_scoped_release unlocked;
  relayout(from.format, source, moved, stream);
}

void run_amax(nb::handle input, nb::handle output, bool per_row) {
  const Array array = input_array("input", input);
  const Array maxima = output_array("out", output);
  const Stream stream = current_stream(array);
  const nb::gil_scoped_release unlocked;
  per_row ? row_amax(array.view, maxima.view, stream)
          : tensor_amax(array.view, maxima.view, stream);
}

void bind_scale_formulas(nb::module_& module) {
  module.def("encode_scale_from_amax", &encode_scale_from_amax, "amax"_a, "e4m3_max"_a = 448,
             "The multiplier that quantize() takes for a tensor with this largest magnitude.");
  module.def("decode_scale_from_encode", &decode_scale_from_encode, "encode_scale"_a,
             "The global scale that is stored for a multiplier.");
  module.def(
      "encode_scale_from_decode",
      [](float decode_scale, std::string_view math) {
        return encode_scale_from_decode(decode_scale, parse_math_mode(math));
      },
      "decode_scale"_a, "math"_a = "exact", "The multiplier of a stored global scale.");
  module.def(
      "encode_scales_from_decode",
      [](nb::handle decode_scales, nb::handle out, std::string_view math) {
        const Array decode = input_array("decode_scales", decode_scales);
        const Array encode = output_array("out", out);
        const MathMode mode = parse_math_mode(math);
        const Stream stream = current_stream(decode);
        const nb::gil_scoped_release unlocked;
        encode_scales_from_decode(decode.view, encode.view, mode, stream);
      },
      "decode_scales"_a, "out"_a, "math"_a = "exact",
      "Multipliers of stored global scales where these lie, float32 of equal size.");
}

}  // namespace

void bind_operations(nb::module_& module) {
  nb::class_<QuantizedBuffers>(module, "QuantizedBuffers")
      .def(nb::init<const QuantizedLayout&, nb::handle, nb::handle, nb::handle>(), "layout"_a,
           "values"_a, "scales"_a, "global_scale"_a.none())
      .def_ro("is_writable", &QuantizedBuffers::is_writable);
  module.def("quantize", &run_quantize);
  module.def("repeat_quantize", &repeat_quantize, "input"_a, "output"_a, "options"_a, "count"_a,
             "quantize() of the same arguments, `count` times, for measurements.");
  module.def("silu_mul_quantize", &run_silu_mul_quantize);
  module.def("smooth_quantize", &run_smooth_quantize);
  module.def("rmsnorm_quantize", &run_rmsnorm_quantize);
  module.def("add_rmsnorm_quantize", &run_add_rmsnorm_quantize);
  module.def("dequantize", &run_dequantize, "input"_a, "output"_a, "global_scale_divides"_a,
             "row_offsets"_a.none());
  module.def("relayout", &run_relayout);
  module.def("relayout_scales", &run_relayout_scales);
  module.def("amax", &run_amax);
  bind_scale_formulas(module);
}

}  // namespace narrowfloat::python
