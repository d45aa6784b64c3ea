// The CUDA stream of a call: the one that set_stream() named in this thread, else the current one
// of the library that made the tensors, else of torch where it is imported, else the default one.
#pragma once

#include "narrowfloat/tensor.h"
#include "python/src/arrays.h"

namespace narrowfloat::python {

// `array` is any of the call's. On the CPU nothing is looked up.
Stream current_stream(const Array& array);

// For calls that have no tensor of the device at hand.
Stream current_stream(Device device);

}  // namespace narrowfloat::python
