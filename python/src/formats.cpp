// Listings of formats and layouts, and the sizes of quantized tensors.
#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "narrowfloat/format.h"
#include "python/src/bindings.h"
#include "python/src/choices.h"

namespace narrowfloat::python {
namespace {

namespace nb = nanobind;
using nb::literals::operator""_a;

constexpr size_t kNumLayouts = std::tuple_size_v<decltype(FormatInfo::layouts)>;

std::vector<std::string_view> layout_names() {
  std::vector<std::string_view> names;
  for (size_t i = 0; i < kNumLayouts; ++i) names.push_back(name(static_cast<ScaleLayoutId>(i)));
  return names;
}

std::vector<std::string_view> legal_layouts(const FormatInfo& info) {
  std::vector<std::string_view> names;
  for (size_t i = 0; i < kNumLayouts; ++i) {
    if (info.layouts[i]) names.push_back(name(static_cast<ScaleLayoutId>(i)));
  }
  return names;
}

std::vector<FormatInfo> format_list() { return {all_formats().begin(), all_formats().end()}; }

std::string_view axis_name(const QuantizedLayout& layout) {
  switch (layout.global_scale_axis) {
    case ScaleAxis::kRow:
      return "row";
    case ScaleAxis::kBatch:
      return "batch";
    case ScaleAxis::kTensor:
      break;
  }
  return "tensor";
}

QuantizedLayout make_layout(std::string_view format, std::pair<int64_t, int64_t> shape,
                            const std::optional<std::string>& scale_layout,
                            QuantizedLayoutOptions options, std::string_view axis) {
  if (scale_layout) options.scale_layout = parse_scale_layout(*scale_layout);
  options.global_scale_axis = parse_choice<ScaleAxis>(
      "global_scale_axis", axis,
      {{"tensor", ScaleAxis::kTensor}, {"row", ScaleAxis::kRow}, {"batch", ScaleAxis::kBatch}});
  return quantized_layout(parse_format(format), shape.first, shape.second, options);
}

void bind_format_info(nb::module_& module) {
  nb::class_<FormatInfo>(module, "FormatInfo", "What there is to know about a number format.")
      .def_ro("name", &FormatInfo::name)
      .def_ro("description", &FormatInfo::description, "One line for listings.")
      .def_ro("element_bits", &FormatInfo::element_bits, "4 or 8.")
      .def_prop_ro(
          "block_shape",
          [](const FormatInfo& info) { return std::pair(info.block_rows, info.block_cols); },
          "Elements that share a scale, rows x columns; 0 means all of them.")
      .def_prop_ro(
          "scale_type", [](const FormatInfo& info) { return name(info.scale_type); },
          "What one stored block scale is: E4M3, UE8M0 or F32.")
      .def_prop_ro("default_layout",
                   [](const FormatInfo& info) { return name(info.default_layout); })
      .def_prop_ro("layouts", &legal_layouts, "Names of the layouts that scales may have.")
      .def_ro("has_global_scale", &FormatInfo::has_global_scale)
      .def_ro("has_row_scale", &FormatInfo::has_row_scale,
              "The global scale has a value for each row, computed from that row.")
      .def("__repr__", [](const FormatInfo& info) {
        return "FormatInfo(" + std::string(info.name) + ": " + std::string(info.description) + ")";
      });
}

void bind_layout(nb::module_& module) {
  nb::class_<QuantizedLayout>(module, "QuantizedLayout",
                              "Sizes of the buffers of a quantized [batch, rows, cols] tensor.")
      .def_prop_ro("format", [](const QuantizedLayout& layout) { return name(layout.format); })
      .def_prop_ro("scale_layout",
                   [](const QuantizedLayout& layout) { return name(layout.scale_layout); })
      .def_prop_ro(
          "scale_type",
          [](const QuantizedLayout& layout) { return name(format_info(layout.format).scale_type); },
          "What one stored block scale is: E4M3, UE8M0 or F32.")
      .def_prop_ro(
          "element_bits",
          [](const QuantizedLayout& layout) { return format_info(layout.format).element_bits; })
      .def_ro("batch", &QuantizedLayout::batch)
      .def_ro("rows", &QuantizedLayout::rows)
      .def_ro("cols", &QuantizedLayout::cols)
      .def_ro("value_cols", &QuantizedLayout::value_cols,
              "Columns of the values: cols, or (MXFP8) cols rounded up to the alignment.")
      .def_ro("values_bytes", &QuantizedLayout::values_bytes, "Bytes of all batches.")
      .def_ro("scale_rows", &QuantizedLayout::scale_rows, "Logical rows of a scale tensor.")
      .def_ro("scale_blocks", &QuantizedLayout::scale_blocks, "Logical scales of one row.")
      .def_ro("scale_count", &QuantizedLayout::scale_count,
              "Scales of all batches, padding included.")
      .def_ro("scales_bytes", &QuantizedLayout::scales_bytes)
      .def_prop_ro("global_scale_axis", &axis_name,
                   "What a global scale of nvfp4 ranges over: tensor, row or batch.")
      .def_ro("global_scales", &QuantizedLayout::global_scales,
              "float32 values of the global scale; 0 for formats without.");
}

}  // namespace

void bind_formats(nb::module_& module) {
  bind_format_info(module);
  bind_layout(module);
  module.def("formats", &format_list, "All number formats.");
  module.def("layouts", &layout_names, "Names of all scale layouts.");
  module.def(
      "quantized_layout",
      [](std::string_view format, int64_t rows, int64_t cols,
         const std::optional<std::string>& scale_layout, int64_t batch, int64_t alignment,
         int64_t groups, std::string_view global_scale_axis) {
        return make_layout(format, {rows, cols}, scale_layout,
                           {.batch = batch, .alignment = alignment, .groups = groups},
                           global_scale_axis);
      },
      "format"_a, "rows"_a, "cols"_a, nb::kw_only(), "scale_layout"_a = nb::none(), "batch"_a = 1,
      "alignment"_a = 32, "groups"_a = 0, "global_scale_axis"_a = "tensor",
      "Sizes of a quantized [batch, rows, cols] tensor.\n\n"
      "scale_layout: one of layouts() that the format allows; None is the format's default.\n"
      "alignment: mxfp8 only; value columns are padded to a multiple of it.\n"
      "groups: fp8_1x128 only; row groups whose scales start at padded rows; 0 for none.\n"
      "global_scale_axis: nvfp4 only; tensor, row or batch.");
}

}  // namespace narrowfloat::python
