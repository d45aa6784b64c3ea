// Version, build and threads.
#include "narrowfloat/runtime.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "python/src/arrays.h"
#include "python/src/bindings.h"

namespace narrowfloat::python {
namespace {

NamedValues build_facts() {
  const BuildInfo info = build_info();
  NamedValues facts;
  facts["version"] = info.version;
  facts["compiler"] = info.compiler;
  facts["build_type"] = info.build_type;
  facts["cuda_enabled"] = info.cuda_enabled;
  facts["cuda_architectures"] = info.cuda_architectures;
  return facts;
}

}  // namespace

void bind_runtime(nb::module_& module) {
  module.def("version", &version, "Version of the C++ library, which is the package's.");
  module.def("build_info", &build_facts,
             "Facts of the build: version, compiler, build_type, cuda_enabled, "
             "cuda_architectures.");
  module.def("set_num_threads", &set_num_threads, nb::arg("count"),
             "Upper bound on the worker threads of operations; 0 means all cores. Results never "
             "depend on it.");
  module.def("num_threads", &num_threads, "The bound that set_num_threads() set.");
}

}  // namespace narrowfloat::python
