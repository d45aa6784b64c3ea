// Conversions as the documentation words them, slowly and without bit tricks: the value of a code
// from std::ldexp, rounding as a search for the nearest value in double. What the library's codecs
// are tested against, and ways to enumerate floats.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <utility>
#include <vector>

#include "base/host_device.h"

namespace narrowfloat {

// Value of a non-negative code of a format whose code is exponent field, mantissa field.
inline double slow_value(int code, int mantissa_bits, int bias) {
  const int exponent = code >> mantissa_bits;
  const double mantissa = code & ((1 << mantissa_bits) - 1);
  if (exponent == 0) return std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return std::ldexp(1.0 + std::ldexp(mantissa, -mantissa_bits), exponent - bias);
}

// Values of codes 0 .. max_code, ascending.
inline std::vector<double> slow_values(int max_code, int mantissa_bits, int bias) {
  std::vector<double> values;
  for (int code = 0; code <= max_code; ++code) {
    values.push_back(slow_value(code, mantissa_bits, bias));
  }
  return values;
}

// The code whose value is nearest to x >= 0, ties to the even code, saturating. The search walks
// upwards from `start`, which must not lie above the result.
inline int nearest_code(const std::vector<double>& values, double x, int start = 0) {
  auto code = static_cast<size_t>(start);
  for (; code + 1 < values.size(); ++code) {
    const double below = x - values[code];
    const double above = values[code + 1] - x;
    const bool next_is_even = (code + 1) % 2 == 0;
    if (above > below || (above == below && !next_is_even)) break;
  }
  return static_cast<int>(code);
}

// Calls body(x) for every float halfway between neighbours of `values`, for the two floats next to
// it, and for their negatives.
template <typename Body>
void for_each_near_midpoint(const std::vector<double>& values, const Body& body) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (size_t i = 0; i + 1 < values.size(); ++i) {
    const auto middle = static_cast<float>((values[i] + values[i + 1]) / 2);
    for (const float x :
         {std::nextafter(middle, -kInfinity), middle, std::nextafter(middle, kInfinity)}) {
      body(x);
      body(-x);
    }
  }
}

// Calls body(x) for the float patterns 0, stride, 2 * stride, ... of 0 .. 0x7FFFFFFF, ascending
// (so NaN comes last): about 2^25 magnitudes, with AddressSanitizer 2^22, or all of them with
// NARROWFLOAT_EXHAUSTIVE=1.
#if defined(__SANITIZE_ADDRESS__)
constexpr uint64_t kStride = 487;
#else
constexpr uint64_t kStride = 61;
#endif
template <typename Body>
void for_each_magnitude(const Body& body, uint64_t stride = kStride) {
  const char* setting = std::getenv("NARROWFLOAT_EXHAUSTIVE");
  if (setting != nullptr && setting[0] == '1') stride = 1;
  for (uint64_t bits = 0; bits <= 0x7FFFFFFFU; bits += stride) {
    body(bits_float(static_cast<uint32_t>(bits)));
  }
}

inline bool slow_is_nan(float x) { return x != x; }

// An exact product of two floats rounded to 24 bits with unbounded exponent, then flushed below
// 2^-126 and infinite above the largest float: integer arithmetic on the mantissas (finite
// operands).
inline float slow_ftz_product(float a, float b) {
  const float sign = std::signbit(a) != std::signbit(b) ? -1.0F : 1.0F;
  const bool is_flushed = !std::isnormal(a) || !std::isnormal(b);
  if (is_flushed) return sign * 0.0F;
  int exponent_a = 0;
  int exponent_b = 0;
  const auto mantissa_a =
      static_cast<uint64_t>(std::ldexp(std::frexp(std::fabs(a), &exponent_a), 24));
  const auto mantissa_b =
      static_cast<uint64_t>(std::ldexp(std::frexp(std::fabs(b), &exponent_b), 24));
  uint64_t product = mantissa_a * mantissa_b;  // In [2^46, 2^48).
  int exponent = exponent_a + exponent_b - 48;
  const int drop = product >> 47 != 0 ? 24 : 23;
  const uint64_t rest = product & ((uint64_t{1} << drop) - 1);
  const uint64_t half = uint64_t{1} << (drop - 1);
  product >>= drop;
  exponent += drop;
  if (rest > half || (rest == half && product % 2 == 1)) ++product;
  // product * 2^exponent has at most 24 bits, or is a power of two after a carry.
  const long double value = std::ldexp(static_cast<long double>(product), exponent);
  if (value < 0x1p-126L) return sign * 0.0F;
  if (value > 0x1.fffffep127L) return sign * std::numeric_limits<float>::infinity();
  return sign * static_cast<float>(value);
}

}  // namespace narrowfloat
