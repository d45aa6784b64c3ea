// See moe_arguments.h.
#include "python/src/moe_arguments.h"

#include <string>

#include "narrowfloat/error.h"

namespace narrowfloat::python {

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

}  // namespace narrowfloat::python
