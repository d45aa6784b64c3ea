// How exceptions of the library reach Python: the kind decides the class, the text stays the same.
#pragma once

#include <nanobind/nanobind.h>

namespace narrowfloat::python {

// kInvalidArgument and kCorruptData become ValueError, kUnsupported NotImplementedError, kIo
// OSError, kDevice RuntimeError.
void register_errors(nanobind::module_& module);

}  // namespace narrowfloat::python
