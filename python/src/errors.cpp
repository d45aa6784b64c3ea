// The switch has no default: a new error kind does not compile until it has a Python exception.
#include "python/src/errors.h"

#include <exception>
#include <string>
#include <string_view>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include "narrowfloat/error.h"
#include "python/src/choices.h"

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

// Device faults cannot be had without a device; Python sees them all the same.
void raise_error(std::string_view kind, const std::string& message) {
  throw Error(parse_choice<ErrorKind>("kind", kind,
                                      {{"invalid argument", ErrorKind::kInvalidArgument},
                                       {"unsupported", ErrorKind::kUnsupported},
                                       {"corrupt data", ErrorKind::kCorruptData},
                                       {"I/O error", ErrorKind::kIo},
                                       {"device error", ErrorKind::kDevice}}),
              message);
}

}  // namespace

void register_errors(nanobind::module_& module) {
  nanobind::register_exception_translator(translate);
  module.def(
      "raise_error", &raise_error, nanobind::arg("kind"), nanobind::arg("message"),
      "What an error of the library becomes here; kind as narrowfloat::to_string() says it.");
}

}  // namespace narrowfloat::python
