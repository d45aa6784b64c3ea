// The boundary of the C API (narrowfloat_c.h): exceptions become statuses with a message of the
// thread, structs of any size become those of this library, and plain tensors become views.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "narrowfloat/error.h"
#include "narrowfloat/narrowfloat_c.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat::c_api {

// Stores the message of the exception that is being handled for nf_last_error(); its status.
int32_t status_of_current_exception() noexcept;

// Runs a function of the API.
template <class Body>
int32_t guarded(Body&& body) noexcept {
  try {
    body();
    return kNfOk;
  } catch (...) {
    return status_of_current_exception();
  }
}

[[noreturn]] void throw_invalid(std::string_view argument, const std::string& problem);

// Throws kInvalidArgument for a null pointer.
void require_given(std::string_view argument, const void* given);

// Throws kInvalidArgument for what is neither 0 nor 1.
bool to_bool(std::string_view argument, int32_t value);

// Copies a caller's struct of `size` bytes into one of `known` bytes that is all zero. `least`
// bytes are those of the first version of the struct.
void copy_struct(std::string_view argument, const void* given, size_t least, void* to,
                 size_t known);

// The size of a struct's first version. One that has grown since has a line below.
template <class Struct>
inline constexpr size_t kFirstSize = sizeof(Struct);
template <>
inline constexpr size_t kFirstSize<NfMoeConfig> = offsetof(NfMoeConfig, fast_sums);

// A caller's struct, with zeros for members that the caller does not know.
template <class Struct>
Struct read_struct(std::string_view argument, const Struct* given) {
  Struct copy = {};
  require_given(argument, given);
  copy_struct(argument, given, kFirstSize<Struct>, &copy, sizeof(Struct));
  return copy;
}

// As read_struct(); zeros for a null pointer.
template <class Struct>
Struct read_optional(std::string_view argument, const Struct* given) {
  return given == nullptr ? Struct{} : read_struct(argument, given);
}

// -1 is the CPU.
Device to_device(std::string_view argument, int32_t device);
DType to_dtype(std::string_view argument, const char* text);
// Absent for a tensor without data and rank.
TensorView to_view(std::string_view argument, const NfTensor& tensor);

inline std::string_view text_or(const char* text, std::string_view otherwise) {
  return text == nullptr ? otherwise : std::string_view(text);
}

inline Stream to_stream(void* handle) { return {.handle = handle, .programmatic_launch = false}; }

}  // namespace narrowfloat::c_api
