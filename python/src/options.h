// Options of the quantizers with the arrays that they point into.
#pragma once

#include <vector>

#include "narrowfloat/quantize.h"
#include "python/src/arrays.h"

namespace narrowfloat::python {

struct PythonQuantizeOptions {
  QuantizeOptions options;
  std::vector<Array> arrays;  // Keep the memory of the views in `options` alive.
};

struct PythonRmsNormOptions {
  RmsNormOptions options;
  std::vector<Array> arrays;
};

}  // namespace narrowfloat::python
