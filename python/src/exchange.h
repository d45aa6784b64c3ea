// DLPack's exchange of tensors through C functions, which a library hangs onto its tensor type as
// `__dlpack_c_exchange_api__` (DLPack 1.2; PyTorch since 2.10). No Python is called, no capsule is
// made and nothing is synchronised, so that a call costs tens of nanoseconds a tensor.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

namespace narrowfloat::python {

namespace nb = nanobind;

// Fills `tensor` with the description of a Python tensor and returns true; false for an object
// whose type has no such functions. `tensor` points into the object and owns nothing.
bool describe_tensor(nb::handle object, nb::dlpack::dltensor& tensor);

// The stream that the library of `tensor` currently queues work to on a CUDA device; false where
// the type of `tensor` does not say.
bool stream_of_tensor(nb::handle tensor, int device_index, void*& stream);

}  // namespace narrowfloat::python
