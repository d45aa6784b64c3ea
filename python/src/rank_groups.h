// Functions that the bindings of groups and of workspaces share.
#pragma once

#include <chrono>

#include <nanobind/nanobind.h>

namespace narrowfloat::python {

namespace nb = nanobind;

// Seconds of Python. Throws kInvalidArgument for negative numbers and NaN.
std::chrono::milliseconds parse_deadline(double seconds);

}  // namespace narrowfloat::python
