// Words of Python that several sources parse: devices and types of elements.
#pragma once

#include <string>
#include <string_view>

#include "narrowfloat/format.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat::python {

// "cpu", "cuda" or "cuda:1". Throws kInvalidArgument for other texts.
Device parse_device(const std::string& text);

// "bfloat16", "float16" or "float32". Throws kInvalidArgument for other texts.
DType parse_float_type(std::string_view argument, std::string_view text);
std::string_view float_type_name(DType dtype);

}  // namespace narrowfloat::python
