// A thread's own choice comes first. Everything here runs with the interpreter locked.
#include "python/src/streams.h"

#include <cstdint>
#include <optional>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include "python/src/bindings.h"
#include "python/src/exchange.h"

namespace narrowfloat::python {
namespace {

struct Chosen {
  std::optional<uintptr_t> handle;
  bool programmatic_launch = false;
};

thread_local Chosen chosen;

// The stream that torch would queue to: the default stream where torch, or its CUDA part, is not in
// use.
void* stream_of_torch(int device_index) {
  const nb::handle modules = PyImport_GetModuleDict();
  PyObject* torch = PyDict_GetItemString(modules.ptr(), "torch");
  if (torch == nullptr) return nullptr;
  const nb::object cuda = nb::getattr(torch, "cuda", nb::none());
  const nb::object is_used = nb::getattr(cuda, "is_initialized", nb::none());
  if (is_used.is_none() || !nb::cast<bool>(is_used())) return nullptr;
  const nb::object internals = nb::getattr(torch, "_C", nb::none());
  const nb::object get = nb::getattr(internals, "_cuda_getCurrentRawStream", nb::none());
  if (get.is_none()) return nullptr;
  return reinterpret_cast<void*>(nb::cast<uintptr_t>(get(device_index)));
}

Stream make_stream(void* handle) {
  return {.handle = handle, .programmatic_launch = chosen.programmatic_launch};
}

using Setting = std::pair<std::optional<uintptr_t>, bool>;

// Returns what was set before, for restoring it.
Setting set_stream(std::optional<uintptr_t> handle, bool programmatic_launch) {
  const Setting before{chosen.handle, chosen.programmatic_launch};
  chosen = {handle, programmatic_launch};
  return before;
}

}  // namespace

Stream current_stream(const Array& array) {
  const Device device = array.view.device;
  if (device.type == DeviceType::kCpu) return {};
  void* handle = nullptr;
  if (!chosen.handle && array.object.is_valid() &&
      stream_of_tensor(array.object, device.index, handle)) {
    return make_stream(handle);
  }
  return current_stream(device);
}

Stream current_stream(Device device) {
  if (device.type == DeviceType::kCpu) return {};
  if (chosen.handle) return make_stream(reinterpret_cast<void*>(*chosen.handle));
  return make_stream(stream_of_torch(device.index));
}

void bind_streams(nb::module_& module) {
  module.def("set_stream", &set_stream, nb::arg("handle").none(), nb::arg("programmatic_launch"));
}

}  // namespace narrowfloat::python
