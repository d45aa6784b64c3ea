// The three buffers of a quantized tensor, checked once and then used by any number of calls.
#pragma once

#include <string_view>

#include "narrowfloat/format.h"
#include "python/src/arrays.h"

namespace narrowfloat::python {

// Arrays of exactly the sizes that `layout` asks for. `view` points into them.
struct QuantizedBuffers {
  QuantizedLayout layout;
  Array values;
  Array scales;
  Array global_scale;
  QuantizedView view;
  bool is_writable = false;

  // Throws kInvalidArgument, naming the part, for a wrong size, type or stride.
  QuantizedBuffers(const QuantizedLayout& wanted, nb::handle values_array, nb::handle scales_array,
                   nb::handle global_scale_array);

  // The view to write to. Throws kInvalidArgument if one of the arrays is read-only.
  [[nodiscard]] const QuantizedView& output() const;
};

// The packed scales of `layout` in an array of their own. Throws as QuantizedBuffers does.
ScaleView scale_view(const QuantizedLayout& layout, std::string_view argument, const Array& array);

}  // namespace narrowfloat::python
