// Functions that the bindings of groups and of workspaces share.
#pragma once

#include <chrono>
#include <memory>

#include <nanobind/nanobind.h>

namespace narrowfloat::python {

namespace nb = nanobind;

// Seconds of Python. Throws kInvalidArgument for negative numbers and NaN.
std::chrono::milliseconds parse_deadline(double seconds);

// A function that may be destroyed in any thread. It outlives the interpreter unharmed.
std::shared_ptr<nb::callable> share_function(nb::callable function);

}  // namespace narrowfloat::python
