// The extension module narrowfloat._core: the public headers, function by function. Conveniences
// (defaults, allocation, names of arguments) are the Python files beside it.
#include <nanobind/nanobind.h>

#include "python/src/bindings.h"
#include "python/src/errors.h"

NB_MODULE(_core, module) {
  module.doc() = "The C++ library; use the functions of the package narrowfloat.";
  // At exit the interpreter keeps what modules hold, such as remembered options; that is no leak.
  nanobind::set_leak_warnings(false);
  narrowfloat::python::register_errors(module);
  narrowfloat::python::bind_runtime(module);
  narrowfloat::python::bind_formats(module);
  narrowfloat::python::bind_options(module);
  narrowfloat::python::bind_operations(module);
  narrowfloat::python::bind_kv_cache(module);
  narrowfloat::python::bind_reorder(module);
  narrowfloat::python::bind_files(module);
  narrowfloat::python::bind_checkpoints(module);
  narrowfloat::python::bind_moe(module);
  narrowfloat::python::bind_grouped_gemm(module);
  narrowfloat::python::bind_routing(module);
  narrowfloat::python::bind_explanations(module);
  narrowfloat::python::bind_rank_groups(module);
  narrowfloat::python::bind_allreduce(module);
  narrowfloat::python::bind_expert_parallel(module);
  narrowfloat::python::bind_streams(module);
}
