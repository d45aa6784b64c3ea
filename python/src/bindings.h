// What each source of the module adds to it.
#pragma once

#include <nanobind/nanobind.h>

namespace narrowfloat::python {

void bind_formats(nanobind::module_& module);     // FormatInfo, QuantizedLayout, names, sizes.
void bind_options(nanobind::module_& module);     // QuantizeOptions, RmsNormOptions.
void bind_operations(nanobind::module_& module);  // QuantizedBuffers and what works on them.
void bind_files(nanobind::module_& module);       // Single safetensors files.
void bind_runtime(nanobind::module_& module);     // Version, threads.

}  // namespace narrowfloat::python
