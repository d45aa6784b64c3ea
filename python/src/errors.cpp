// The switch has no default: a new error kind does not compile until it has a Python exception.
#include "python/src/errors.h"

#include <exception>

#include <nanobind/nanobind.h>

#include "narrowfloat/error.h"

namespace narrowfloat::python {
namespace {

PyObject* python_exception(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kInvalidArgument:
    case ErrorKind::kCorruptData:
      return PyExc_ValueError;
    case ErrorKind::kUnsupported:
      return PyExc_NotImplementedError;
    case ErrorKind::kIo:
      return PyExc_OSError;
    case ErrorKind::kDevice:
      return PyExc_RuntimeError;
  }
  return PyExc_RuntimeError;
}

void translate(const std::exception_ptr& pointer, void* /*payload*/) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    PyErr_SetString(python_exception(error.kind()), error.what());
  }
}

}  // namespace

void register_errors() { nanobind::register_exception_translator(translate); }

}  // namespace narrowfloat::python
