// Arrays of Python as views. Both directions go through DLPack's description of an array.
#include "python/src/arrays.h"

#include <cstdint>
#include <string>

#include <nanobind/stl/string.h>

#include "narrowfloat/error.h"

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

void require_cpu(std::string_view argument, const nb::ndarray<nb::ro>& array) {
  const int type = array.device_type();
  if (type == nb::device::cpu::value || type == nb::device::cuda_host::value) return;
  const bool is_cuda = type == nb::device::cuda::value || type == nb::device::cuda_managed::value;
  refuse(ErrorKind::kUnsupported, argument,
         (is_cuda ? "an array on cuda:" + std::to_string(array.device_id())
                  : "an array on a device of DLPack type " + std::to_string(type)) +
             ", but this build of the Python package computes on the CPU; copy it there");
}

// More axes than a view has are fine where they lie densely: the leading ones become one.
void set_matrix(std::string_view argument, const nb::ndarray<nb::ro>& array, TensorView& view) {
  const size_t last = array.ndim() - 1;
  int64_t dense = 1;
  for (size_t axis = array.ndim(); axis-- > 0;) {
    if (array.shape(axis) != 1 && array.stride(axis) != dense && array.size() > 0) {
      refuse(ErrorKind::kInvalidArgument, argument,
             "expected at most " + std::to_string(TensorView::kMaxRank) +
                 " axes or a C-contiguous array, got " + std::to_string(array.ndim()) +
                 "; reshape it");
    }
    dense *= static_cast<int64_t>(array.shape(axis));
  }
  const auto cols = static_cast<int64_t>(array.shape(last));
  view.rank = 2;
  view.shape = {cols > 0 ? dense / cols : 0, cols};
  view.strides = {cols, 1};
}

TensorView view_of(std::string_view argument, const nb::ndarray<nb::ro>& array) {
  require_cpu(argument, array);
  TensorView view;
  view.dtype = dtype_of(argument, array.dtype());
  if (array.ndim() > static_cast<size_t>(TensorView::kMaxRank)) {
    set_matrix(argument, array, view);
  } else {
    view.rank = static_cast<int>(array.ndim());
    for (size_t axis = 0; axis < array.ndim(); ++axis) {
      view.shape[axis] = static_cast<int64_t>(array.shape(axis));
      view.strides[axis] = array.stride(axis);
    }
  }
  // Views do not tell inputs from outputs; operations never write through their inputs.
  view.data = const_cast<void*>(static_cast<const void*>(array.data()));
  if (reinterpret_cast<uintptr_t>(view.data) % array.itemsize() != 0) {
    refuse(ErrorKind::kInvalidArgument, argument,
           "expected memory aligned to " + std::to_string(array.itemsize()) +
               " bytes; copy the array");
  }
  return view;
}

}  // namespace

Array input_array(std::string_view argument, nb::handle object) {
  Array array;
  if (object.is_none()) return array;
  if (!nb::try_cast(object, array.owner)) {
    const auto type = nb::cast<std::string>(object.type().attr("__name__"));
    const std::string message = std::string(argument) + ": expected an array, got " + type;
    throw nb::type_error(message.c_str());
  }
  array.view = view_of(argument, array.owner);
  return array;
}

Array output_array(std::string_view argument, nb::handle object) {
  Array array = input_array(argument, object);
  if (!object.is_none() && !is_writable(object)) {
    refuse(ErrorKind::kInvalidArgument, argument, "the array is read-only");
  }
  return array;
}

// Producers of read-only memory fail an import that asks to write.
bool is_writable(nb::handle array) {
  nb::ndarray<> writable;
  return nb::try_cast(array, writable);
}

bool is_dense(const TensorView& view) {
  int64_t expected = 1;
  for (auto axis = static_cast<size_t>(view.rank); axis-- > 0;) {
    if (view.shape[axis] == 0) return true;
    if (view.shape[axis] != 1 && view.strides[axis] != expected) return false;
    expected *= view.shape[axis];
  }
  return true;
}

}  // namespace narrowfloat::python
