// Arrays of Python as views. Both directions go through DLPack's description of an array.
#include "python/src/arrays.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include <nanobind/stl/string.h>

#include "narrowfloat/error.h"
#include "python/src/exchange.h"

namespace narrowfloat::python {
namespace {

using Code = nb::dlpack::dtype_code;

struct DTypeName {
  Code code;
  int bits;
  DType dtype;
};

constexpr DTypeName kDTypes[] = {
    {Code::Float, 32, DType::kF32},
    {Code::Float, 16, DType::kF16},
    {Code::Float, 64, DType::kF64},
    {Code::Bfloat, 16, DType::kBF16},
    {Code::UInt, 16, DType::kBF16},
    {Code::UInt, 8, DType::kF8E4M3},
    {Code::Float8_E4M3FN, 8, DType::kF8E4M3},
    {Code::Float8_E5M2, 8, DType::kF8E5M2},
    {Code::Float8_E8M0FNU, 8, DType::kF8E8M0},
    {Code::Int, 32, DType::kI32},
    {Code::Int, 64, DType::kI64},
    {Code::Int, 8, DType::kI8},
    {Code::Int, 16, DType::kI16},
    {Code::UInt, 32, DType::kU32},
    {Code::UInt, 64, DType::kU64},
    {Code::Bool, 8, DType::kBool},
};

[[noreturn]] void refuse(ErrorKind kind, std::string_view argument, const std::string& reason) {
  throw Error(kind, std::string(argument) + ": " + reason);
}

DType dtype_of(std::string_view argument, nb::dlpack::dtype dtype) {
  for (const DTypeName& entry : kDTypes) {
    if (static_cast<uint8_t>(entry.code) == dtype.code && entry.bits == dtype.bits &&
        dtype.lanes == 1) {
      return entry.dtype;
    }
  }
  refuse(ErrorKind::kInvalidArgument, argument,
         "no type of narrowfloat corresponds to this array's (DLPack code " +
             std::to_string(dtype.code) + ", " + std::to_string(dtype.bits) + " bits)");
}

// Memory that both sides can read counts as the CPU's where it is pinned, as CUDA's where managed.
Device device_of(std::string_view argument, const nb::dlpack::dltensor& tensor) {
  const int type = tensor.device.device_type;
  if (type == nb::device::cpu::value || type == nb::device::cuda_host::value) return {};
  if (type == nb::device::cuda::value || type == nb::device::cuda_managed::value) {
    return {.type = DeviceType::kCuda, .index = tensor.device.device_id};
  }
  refuse(ErrorKind::kUnsupported, argument,
         "an array on a device of DLPack type " + std::to_string(type) +
             ", but narrowfloat computes on the CPU and on CUDA devices; copy it there");
}

// More axes than a view has are fine where they lie densely: the leading ones become one.
void set_matrix(std::string_view argument, const nb::dlpack::dltensor& tensor, TensorView& view) {
  int64_t dense = 1;
  bool is_empty = false;
  for (int axis = 0; axis < tensor.ndim; ++axis) is_empty |= tensor.shape[axis] == 0;
  for (int axis = tensor.ndim; axis-- > 0;) {
    if (tensor.shape[axis] != 1 && tensor.strides[axis] != dense && !is_empty) {
      refuse(ErrorKind::kInvalidArgument, argument,
             "expected at most " + std::to_string(TensorView::kMaxRank) +
                 " axes or a C-contiguous array, got " + std::to_string(tensor.ndim) +
                 "; reshape it");
    }
    dense *= tensor.shape[axis];
  }
  const int64_t cols = tensor.shape[tensor.ndim - 1];
  view.rank = 2;
  view.shape = {cols > 0 ? dense / cols : 0, cols};
  view.strides = {cols, 1};
}

// Strides and addresses of arrays without elements mean nothing: strides are 0 in newer versions of
// NumPy, and empty bytes of Python 3.13 begin at an odd address. So the next aligned one will do.
void settle_empty(TensorView& view) {
  if (view.num_elements() > 0) return;
  constexpr uintptr_t kAlignment = 256;  // The largest that the library asks for.
  const uintptr_t skip = -reinterpret_cast<uintptr_t>(view.data) % kAlignment;
  view.data = static_cast<char*>(view.data) + skip;
  int64_t dense = 1;
  for (auto axis = static_cast<size_t>(view.rank); axis-- > 0;) {
    view.strides[axis] = dense;
    dense *= std::max<int64_t>(view.shape[axis], 1);
  }
}

TensorView view_of(std::string_view argument, const nb::dlpack::dltensor& tensor, DType bytes_as) {
  TensorView view;
  view.device = device_of(argument, tensor);
  view.dtype = dtype_of(argument, tensor.dtype);
  if (tensor.dtype.code == static_cast<uint8_t>(Code::UInt) && tensor.dtype.bits == 8) {
    view.dtype = bytes_as;
  }
  if (tensor.ndim > TensorView::kMaxRank) {
    set_matrix(argument, tensor, view);
  } else {
    view.rank = tensor.ndim;
    for (int axis = 0; axis < tensor.ndim; ++axis) {
      const auto i = static_cast<size_t>(axis);
      view.shape[i] = tensor.shape[axis];
      view.strides[i] = tensor.strides[axis];
    }
  }
  // Views do not tell inputs from outputs; operations never write through their inputs.
  view.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  settle_empty(view);
  const uintptr_t item_bytes = tensor.dtype.bits / 8U;
  if (reinterpret_cast<uintptr_t>(view.data) % item_bytes != 0) {
    refuse(ErrorKind::kInvalidArgument, argument,
           "expected memory aligned to " + std::to_string(item_bytes) + " bytes; copy the array");
  }
  return view;
}

// Describes an imported array in DLPack's form. Its strides are always there.
nb::dlpack::dltensor describe(const nb::ndarray<nb::ro>& array) {
  return {.data = const_cast<void*>(static_cast<const void*>(array.data())),
          .device = {array.device_type(), array.device_id()},
          .ndim = static_cast<int32_t>(array.ndim()),
          .dtype = array.dtype(),
          .shape = const_cast<int64_t*>(array.shape_ptr()),
          .strides = const_cast<int64_t*>(array.stride_ptr()),
          .byte_offset = 0};
}

// Raises what a library says about a tensor that it cannot describe, without its backtrace.
[[noreturn]] void refuse_tensor(std::string_view argument, nb::handle object,
                                const std::string& reason) {
  const nb::object device = nb::getattr(object, "device", nb::none());
  if (nb::cast<std::string>(nb::str(device)) == "meta") {
    refuse(ErrorKind::kUnsupported, argument,
           "expected a tensor with values, got one on the meta device; make it on the CPU or on a "
           "GPU");
  }
  refuse(ErrorKind::kUnsupported, argument,
         "expected a dense tensor, got one that has no description in DLPack: " +
             reason.substr(0, reason.find('\n')));
}

// Describes a tensor in place; false for other objects.
bool describe(std::string_view argument, nb::handle object, nb::dlpack::dltensor& tensor) {
  try {
    return describe_tensor(object, tensor);
  } catch (const nb::python_error& error) {
    refuse_tensor(argument, object, error.what());
  }
}

[[noreturn]] void throw_no_array(std::string_view argument, nb::handle object) {
  const auto type = nb::cast<std::string>(object.type().attr("__name__"));
  const std::string message = std::string(argument) + ": expected an array, got " + type;
  throw nb::type_error(message.c_str());
}

}  // namespace

Array input_array(std::string_view argument, nb::handle object, DType bytes_as) {
  Array array;
  if (object.is_none()) return array;
  nb::dlpack::dltensor tensor{};
  if (describe(argument, object, tensor)) {
    array.object = nb::borrow(object);
    array.view = view_of(argument, tensor, bytes_as);
    return array;
  }
  if (!nb::try_cast(object, array.owner)) throw_no_array(argument, object);
  array.view = view_of(argument, describe(array.owner), bytes_as);
  return array;
}

Array output_array(std::string_view argument, nb::handle object, DType bytes_as) {
  Array array = input_array(argument, object, bytes_as);
  if (!object.is_none() && !is_writable(array, object)) {
    refuse(ErrorKind::kInvalidArgument, argument, "the array is read-only");
  }
  return array;
}

// Producers of read-only memory fail an import that asks to write. Tensors that were described in
// place come from libraries that have no such memory.
bool is_writable(const Array& array, nb::handle object) {
  if (array.object.is_valid()) return true;
  nb::ndarray<> writable;
  return nb::try_cast(object, writable);
}

bool is_dense(const TensorView& view) {
  if (view.num_elements() == 0) return true;
  int64_t expected = 1;
  for (auto axis = static_cast<size_t>(view.rank); axis-- > 0;) {
    if (view.shape[axis] != 1 && view.strides[axis] != expected) return false;
    expected *= view.shape[axis];
  }
  return true;
}

}  // namespace narrowfloat::python
