// The buffers of a quantized tensor: sizes and types against the layout. Element types are checked
// by size, since codes come as uint8 or as any of the narrow types that stand for them.
#include "python/src/buffers.h"

#include <string>

#include "narrowfloat/error.h"

namespace narrowfloat::python {
namespace {

void require_part(std::string_view argument, const TensorView& view, int64_t count, int item_bits) {
  const bool is_float = item_bits == 32;
  if (!view.is_absent() && is_dense(view) && view.num_elements() == count &&
      (is_float ? view.dtype == DType::kF32 : bits(view.dtype) == item_bits)) {
    return;
  }
  std::string got = view.is_absent() ? "None" : to_string(view);
  if (!view.is_absent() && !is_dense(view)) got += " with gaps between its elements";
  throw Error(ErrorKind::kInvalidArgument,
              std::string(argument) + ": expected a C-contiguous array of " +
                  std::to_string(count) + (is_float ? " float32" : " one-byte elements (uint8)") +
                  ", got " + got);
}

bool is_writable_or_none(const Array& array, nb::handle object) {
  return object.is_none() || is_writable(array, object);
}

void require_device(std::string_view argument, const TensorView& view, Device device) {
  if (view.is_absent() || view.device == device) return;
  throw Error(ErrorKind::kInvalidArgument, std::string(argument) + ": expected an array on " +
                                               to_string(device) + " like values, got one on " +
                                               to_string(view.device));
}

}  // namespace

QuantizedBuffers::QuantizedBuffers(const QuantizedLayout& wanted, nb::handle values_array,
                                   nb::handle scales_array, nb::handle global_scale_array)
    : layout(wanted),
      values(input_array("values", values_array)),
      scales(input_array("scales", scales_array)),
      global_scale(input_array("global_scale", global_scale_array)),
      is_writable(is_writable_or_none(values, values_array) &&
                  is_writable_or_none(scales, scales_array) &&
                  is_writable_or_none(global_scale, global_scale_array)) {
  require_part("values", values.view, layout.values_bytes, 8);
  const int scale_bits = 8 * bytes(format_info(layout.format).scale_type);
  require_part("scales", scales.view, layout.scale_count, scale_bits);
  if (layout.global_scales > 0 || !global_scale.view.is_absent()) {
    require_part("global_scale", global_scale.view, layout.global_scales, 32);
  }
  const Device device = values.view.device;
  require_device("scales", scales.view, device);
  require_device("global_scale", global_scale.view, device);
  view = layout.bind(values.view.data, scales.view.data,
                     static_cast<float*>(global_scale.view.data), device);
}

const QuantizedView& QuantizedBuffers::output() const {
  if (!is_writable) throw Error(ErrorKind::kInvalidArgument, "out: an array of it is read-only");
  return view;
}

ScaleView scale_view(const QuantizedLayout& layout, std::string_view argument, const Array& array) {
  const int scale_bits = 8 * bytes(format_info(layout.format).scale_type);
  require_part(argument, array.view, layout.scale_count, scale_bits);
  return layout.bind(nullptr, array.view.data, nullptr, array.view.device).scales;
}

}  // namespace narrowfloat::python
