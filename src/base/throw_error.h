// Helpers that throw narrowfloat::Error with a formatted message: one short call at every check.
#pragma once

#include <utility>

#include <fmt/format.h>

#include "narrowfloat/error.h"

namespace narrowfloat {

template <typename... Args>
[[noreturn]] void throw_error(ErrorKind kind, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(kind, fmt::format(format, std::forward<Args>(args)...));
}

template <typename... Args>
[[noreturn]] void throw_invalid(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(ErrorKind::kInvalidArgument, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace narrowfloat
