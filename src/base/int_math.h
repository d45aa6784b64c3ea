// Integer helpers: the only ceil_div and round_up of the project, and checked 64-bit arithmetic.
#pragma once

#include <cstdint>
#include <optional>

#include "base/host_device.h"

namespace narrowfloat {

// a >= 0, b > 0.
NF_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return a / b + (a % b != 0 ? 1 : 0);
}

// a rounded up to a multiple of b.
NF_HOST_DEVICE constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Empty where the result does not fit.
constexpr std::optional<int64_t> checked_mul(int64_t a, int64_t b) {
  int64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) return std::nullopt;
  return result;
}
constexpr std::optional<int64_t> checked_add(int64_t a, int64_t b) {
  int64_t result = 0;
  if (__builtin_add_overflow(a, b, &result)) return std::nullopt;
  return result;
}

}  // namespace narrowfloat
