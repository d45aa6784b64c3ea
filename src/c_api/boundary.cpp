// Errors, structs and tensors at the boundary of the C API.
#include "c_api/boundary.h"

#include <algorithm>
#include <exception>
#include <new>
#include <optional>

#include "narrowfloat/runtime.h"

namespace narrowfloat::c_api {

namespace {

thread_local std::string last_error;

int32_t remember(int32_t status, const char* message) noexcept {
  try {
    last_error = message;
  } catch (const std::bad_alloc&) {
    last_error.clear();
  }
  return status;
}

}  // namespace

int32_t status_of_current_exception() noexcept {
  try {
    throw;
  } catch (const Error& error) {
    return remember(static_cast<int32_t>(error.kind()), error.what());
  } catch (const std::bad_alloc&) {
    return remember(kNfOutOfMemory, "out of memory");
  } catch (const std::exception& error) {
    return remember(kNfInternal, error.what());
  } catch (...) {
    return remember(kNfInternal, "an exception that is not derived from std::exception");
  }
}

void throw_invalid(std::string_view argument, const std::string& problem) {
  throw Error(ErrorKind::kInvalidArgument, std::string(argument) + ": " + problem);
}

void require_given(std::string_view argument, const void* given) {
  if (given == nullptr) throw_invalid(argument, "expected a pointer, got NULL");
}

bool to_bool(std::string_view argument, int32_t value) {
  if (value != 0 && value != 1) {
    throw_invalid(argument, "expected 0 or 1, got " + std::to_string(value));
  }
  return value == 1;
}

void copy_struct(std::string_view argument, const void* given, size_t least, void* to,
                 size_t known) {
  uint32_t size = 0;
  std::memcpy(&size, given, sizeof(size));
  if (size < least) {
    throw_invalid(argument, "expected struct_size of at least " + std::to_string(least) + ", got " +
                                std::to_string(size) + "; set it to sizeof of the struct");
  }
  const auto* bytes = static_cast<const unsigned char*>(given);
  if (std::any_of(bytes + std::min<size_t>(size, known), bytes + size,
                  [](unsigned char byte) { return byte != 0; })) {
    throw_invalid(argument, "has members that this library (version " + std::string(version()) +
                                ") does not know, and they are not zero; use a newer library");
  }
  std::memcpy(to, given, std::min<size_t>(size, known));
}

Device to_device(std::string_view argument, int32_t device) {
  if (device < -1) {
    throw_invalid(argument, "expected -1 (the CPU) or the number of a CUDA device, got " +
                                std::to_string(device));
  }
  return device == -1 ? Device{} : Device{.type = DeviceType::kCuda, .index = device};
}

DType to_dtype(std::string_view argument, const char* text) {
  const std::string_view given = text_or(text, "NULL");
  const std::optional<DType> dtype = parse_dtype(given);
  if (!dtype) {
    throw_invalid(argument, "expected a dtype as safetensors spells it, BF16 for example, got " +
                                std::string(given));
  }
  return *dtype;
}

TensorView to_view(std::string_view argument, const NfTensor& tensor) {
  TensorView view;
  if (tensor.data == nullptr && tensor.rank == 0) return view;
  if (tensor.rank < 0 || tensor.rank > TensorView::kMaxRank) {
    throw_invalid(argument, "expected a rank from 0 to 4, got " + std::to_string(tensor.rank));
  }
  view.data = tensor.data;
  view.dtype = to_dtype(argument, tensor.dtype);
  view.device = to_device(argument, tensor.device);
  view.rank = tensor.rank;
  bool is_dense = true;
  const size_t rank = static_cast<size_t>(tensor.rank);
  for (size_t axis = 0; axis < rank; ++axis) {
    view.shape.at(axis) = tensor.shape[axis];
    view.strides.at(axis) = tensor.strides[axis];
    is_dense = is_dense && tensor.strides[axis] == 0;
  }
  int64_t stride = 1;
  for (size_t left = rank; is_dense && left > 0; --left) {
    const size_t axis = left - 1;
    if (view.shape.at(axis) < 0) {
      throw_invalid(argument,
                    "expected extents of at least 0, got " + std::to_string(view.shape.at(axis)));
    }
    view.strides.at(axis) = stride;
    if (__builtin_mul_overflow(stride, std::max<int64_t>(view.shape.at(axis), 1), &stride)) {
      throw_invalid(argument, "has more than 2^63 elements");
    }
  }
  return view;
}

}  // namespace narrowfloat::c_api

const char* nf_version() { return narrowfloat::version().data(); }

const char* nf_last_error() { return narrowfloat::c_api::last_error.c_str(); }

int32_t nf_set_num_threads(int32_t count) {
  return narrowfloat::c_api::guarded([&] { narrowfloat::set_num_threads(count); });
}
