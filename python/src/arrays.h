// Arrays of Python as views: no copy, whatever library made them (DLPack or the buffer protocol).
//
// Types that arrays cannot express arrive as unsigned integers of their size: uint16 stands for the
// bits of BF16, uint8 for those of F8_E4M3, or for the type that the caller names. The library
// checks what an operation accepts; these functions only make sure that memory can be accessed at
// all.
#pragma once

#include <string_view>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "narrowfloat/tensor.h"

namespace narrowfloat::python {

namespace nb = nanobind;

// Dictionaries, as the module's stub shows them.
using NamedArrays = nb::typed<nb::dict, nb::str, nb::object>;
using NamedTexts = nb::typed<nb::dict, nb::str, nb::str>;
using NamedValues = nb::typed<nb::dict, nb::str, nb::any>;

// One array of a call: `object` or `owner` keeps the memory of `view` alive.
struct Array {
  nb::object object;          // A tensor that was described in place (exchange.h), or
  nb::ndarray<nb::ro> owner;  // an imported array.
  TensorView view;
};

// Throws TypeError for an object that is no array; kInvalidArgument for misaligned memory, more
// than four axes or a type that DType lacks; kUnsupported for memory of other devices than CPU and
// CUDA. The message begins with `argument`. None gives an absent view. uint8 elements become
// `bytes_as`.
Array input_array(std::string_view argument, nb::handle object, DType bytes_as = DType::kF8E4M3);
// Like input_array; also refuses memory that may not be written.
Array output_array(std::string_view argument, nb::handle object, DType bytes_as = DType::kF8E4M3);

bool is_writable(const Array& array, nb::handle object);

// A dense row-major view, as buffers must be that have no strides.
bool is_dense(const TensorView& view);

}  // namespace narrowfloat::python
