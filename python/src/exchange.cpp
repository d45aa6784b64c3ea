// The structures are those of dlpack.h, which fixes their layout within a major version.
#include "python/src/exchange.h"

#include <cstdint>

namespace narrowfloat::python {
namespace {

struct Header {
  uint32_t major;
  uint32_t minor;
  Header* previous;
};

struct ExchangeApi {
  Header header;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, nb::dlpack::dltensor* tensor);
  int (*current_stream)(int32_t device_type, int32_t device_id, void** stream);
};

constexpr uint32_t kMajor = 1;

// The functions of the object's type; null where it has none of this major version. The type and
// with it the capsule outlive the object, so the pointer may be kept for as long.
const ExchangeApi* api_of(nb::handle object) {
  PyObject* attribute = PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())),
                                               "__dlpack_c_exchange_api__");
  if (attribute == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  const void* found = PyCapsule_GetPointer(attribute, "dlpack_exchange_api");
  Py_DECREF(attribute);
  if (found == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  for (const auto* header = static_cast<const Header*>(found); header != nullptr;
       header = header->previous) {
    if (header->major == kMajor) return reinterpret_cast<const ExchangeApi*>(header);
  }
  return nullptr;
}

}  // namespace

bool describe_tensor(nb::handle object, nb::dlpack::dltensor& tensor) {
  const ExchangeApi* api = api_of(object);
  if (api == nullptr || api->tensor_from_object == nullptr) return false;
  if (api->tensor_from_object(object.ptr(), &tensor) != 0) throw nb::python_error();
  return true;
}

bool stream_of_tensor(nb::handle tensor, int device_index, void*& stream) {
  const ExchangeApi* api = api_of(tensor);
  if (api == nullptr || api->current_stream == nullptr) return false;
  if (api->current_stream(nb::device::cuda::value, device_index, &stream) != 0) {
    throw nb::python_error();
  }
  return true;
}

}  // namespace narrowfloat::python
