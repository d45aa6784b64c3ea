// See moe_arguments.h.
#include "python/src/moe_arguments.h"

#include <string>

#include "narrowfloat/error.h"

namespace narrowfloat::python {
namespace {

// The packed scales of weights [experts, rows, cols], in the mode's format.
ScaleView weight_scales(WeightFormat format, const TensorView& values, const TensorView& scales,
                        ScaleLayoutId layout) {
  const int64_t rows = values.shape[1];
  const int64_t cols = values.dtype == DType::kU8 ? 2 * values.shape[2] : values.shape[2];
  ScaleView view{.data = scales.data,
                 .type = ScaleType::kUE8M0,
                 .layout = layout,
                 .device = scales.device,
                 .batch = values.shape[0],
                 .rows = rows,
                 .blocks = cols / 32,
                 .capacity = scales.num_elements()};
  if (format == WeightFormat::kNvfp4) {
    view.type = ScaleType::kE4M3;
    view.blocks = cols / 16;
  } else if (format == WeightFormat::kFp8Block) {
    view.type = ScaleType::kF32;
    view.rows = (rows + 127) / 128;
    view.blocks = (cols + 127) / 128;
  }
  return view;
}

}  // namespace

PerExpert per_expert(std::string_view argument, nb::handle value, std::vector<Array>& arrays) {
  double number = 0;
  // Without conversions: an array of one element is an array, and may lie on a GPU.
  if (nb::try_cast(value, number, /*convert=*/false)) return static_cast<float>(number);
  const Array& array = arrays.emplace_back(input_array(argument, value));
  return PerExpert(array.view);
}

void throw_unknown_member(std::string_view name) {
  throw Error(ErrorKind::kInvalidArgument, std::string(name) + ": no such argument");
}

Routing routing_of(const NamedArrays& source, std::vector<Array>& arrays) {
  static constexpr NamedView<Routing> kMembers[] = {{"logits", &Routing::logits},
                                                    {"bias", &Routing::bias},
                                                    {"packed", &Routing::packed},
                                                    {"ids", &Routing::ids},
                                                    {"weights", &Routing::weights}};
  Routing routing;
  set_views(source, kMembers, routing, arrays, false);
  return routing;
}

DeviceErrors* device_errors(nb::handle array, std::vector<Array>& arrays) {
  static_assert(sizeof(DeviceErrors) == 16);
  if (array.is_none()) return nullptr;
  const Array& errors = arrays.emplace_back(output_array("errors", array));
  if (errors.view.dtype != DType::kI64 || errors.view.num_elements() != 2 ||
      !is_dense(errors.view)) {
    throw Error(ErrorKind::kInvalidArgument,
                "errors: expected int64 [2], got " + to_string(errors.view));
  }
  return static_cast<DeviceErrors*>(errors.view.data);
}

DType type_of_bytes(MoeMode mode) {
  const RowFormat format = moe_mode_info(mode).input;
  const bool is_fp4 = format == RowFormat::kNvfp4 || format == RowFormat::kNvfp4PerToken;
  return is_fp4 ? DType::kU8 : DType::kF8E4M3;
}

WeightView weight_view(std::string_view which, MoeMode mode, nb::handle values, nb::handle scales,
                       std::string_view layout, std::vector<Array>& arrays) {
  const WeightFormat format = moe_mode_info(mode).weights;
  const bool is_fp4 = format == WeightFormat::kMxfp4 || format == WeightFormat::kNvfp4;
  const DType byte_type = is_fp4 ? DType::kU8 : DType::kF8E4M3;
  WeightView target;
  target.values = arrays.emplace_back(input_array(which, values, byte_type)).view;
  if (target.values.rank != 3) {
    throw Error(
        ErrorKind::kInvalidArgument,
        std::string(which) + ": expected [experts, rows, cols], got " + to_string(target.values));
  }
  if (scales.is_none()) return target;
  const std::string argument = std::string(which) + "_scales";
  const Array& array = arrays.emplace_back(input_array(argument, scales, DType::kU8));
  const bool is_float = format == WeightFormat::kFp8Block;
  if (!is_dense(array.view) ||
      (is_float ? array.view.dtype != DType::kF32 : bits(array.view.dtype) != 8)) {
    throw Error(ErrorKind::kInvalidArgument, argument + ": expected a C-contiguous array of " +
                                                 (is_float ? "float32" : "uint8") + ", got " +
                                                 to_string(array.view));
  }
  target.scales = weight_scales(format, target.values, array.view, parse_scale_layout(layout));
  return target;
}

}  // namespace narrowfloat::python
