// Options as objects that are filled attribute by attribute, so that an option nobody set keeps the
// library's default.
#include "python/src/options.h"

#include <string_view>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>

#include "python/src/bindings.h"
#include "python/src/buffers.h"
#include "python/src/choices.h"

namespace narrowfloat::python {
namespace {

using Options = PythonQuantizeOptions;

void set_four_over_six(Options& self, std::string_view error, std::string_view error_math,
                       int e4m3_max) {
  self.options.four_over_six = {
      .enabled = true,
      .error = parse_choice<FourOverSixError>(
          "four_over_six.error", error,
          {{"mae", FourOverSixError::kMae}, {"mse", FourOverSixError::kMse}}),
      .error_math = parse_choice<FourOverSixMath>(
          "four_over_six.error_math", error_math,
          {{"strict", FourOverSixMath::kStrict}, {"fast", FourOverSixMath::kFast}}),
      .e4m3_max = e4m3_max};
}

void set_fp8_rule(Options& self, std::string_view text) {
  constexpr Fp8ScaleRule kRules[] = {Fp8ScaleRule::kReciprocal, Fp8ScaleRule::kReciprocalPow2,
                                     Fp8ScaleRule::kAmaxDiv, Fp8ScaleRule::kPow2Ceil};
  self.options.fp8_rule = parse_choice<Fp8ScaleRule>("fp8_rule", text,
                                                     {{name(kRules[0]), kRules[0]},
                                                      {name(kRules[1]), kRules[1]},
                                                      {name(kRules[2]), kRules[2]},
                                                      {name(kRules[3]), kRules[3]}});
}

// A setter for one of the vectors among the options.
template <TensorView QuantizeOptions::*kMember>
auto vector_setter(const char* argument) {
  return [argument](Options& self, nb::handle object) {
    const Array& array = self.arrays.emplace_back(input_array(argument, object));
    self.options.*kMember = array.view;
  };
}

void set_extra_scales(PythonRmsNormOptions& self, const QuantizedLayout& layout,
                      nb::handle object) {
  const Array& array = self.arrays.emplace_back(output_array("extra_scales", object));
  self.options.extra_scales = scale_view(layout, "extra_scales", array);
}

void set_norm_output(PythonRmsNormOptions& self, nb::handle object) {
  self.options.norm_output = self.arrays.emplace_back(output_array("norm_output", object)).view;
}

}  // namespace

void bind_options(nb::module_& module) {
  nb::class_<Options>(module, "QuantizeOptions")
      .def(nb::init<>())
      .def("set_math",
           [](Options& self, std::string_view text) { self.options.math = parse_math_mode(text); })
      .def("set_encode_scale",
           [](Options& self, float scale) { self.options.encode_scale = scale; })
      .def("set_encode_scales", vector_setter<&QuantizeOptions::encode_scales>("encode_scale"))
      .def("set_four_over_six", &set_four_over_six)
      .def("set_base_decode_scale",
           [](Options& self, float scale) { self.options.base_decode_scale = scale; })
      .def("set_base_decode_scales",
           vector_setter<&QuantizeOptions::base_decode_scales>("base_decode_scale"))
      .def("set_row_list", vector_setter<&QuantizeOptions::row_list>("row_list"))
      .def("set_mx_scale",
           [](Options& self, std::string_view text) {
             self.options.mx_scale = parse_ue8m0_rounding(text);
           })
      .def("set_fp8_rule", &set_fp8_rule)
      .def("set_fp8_eps", [](Options& self, float eps) { self.options.fp8_eps = eps; })
      .def("set_fp8_decode_scale",
           [](Options& self, float scale) { self.options.fp8_decode_scale = scale; })
      .def("set_valid_rows", vector_setter<&QuantizeOptions::valid_rows>("valid_rows"))
      .def("set_row_offsets", vector_setter<&QuantizeOptions::row_offsets>("row_offsets"));
  nb::class_<PythonRmsNormOptions>(module, "RmsNormOptions")
      .def("__init__",
           [](PythonRmsNormOptions* self, float eps) {
             new (self) PythonRmsNormOptions{.options = {.eps = eps}, .arrays = {}};
           })
      .def("set_norm_output", &set_norm_output)
      .def("set_extra_scales", &set_extra_scales);
}

}  // namespace narrowfloat::python
