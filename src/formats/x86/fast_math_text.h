// FastMath of formats/math_policy.h in vectors: text that sources for a level of vector
// instructions compile (docs/architecture.md, levels of vector instructions).
//
// The instructions flush as the mode does: denormal operands count as zero, and results that are
// below 2^-126 after rounding to 24 bits become zero.
#pragma once

#include <cstdint>

#include "formats/rcp_table.h"

namespace narrowfloat::fast_math_text {

// Calls body(), whose arithmetic flushes. body is a function that is not inlined, since compilers
// may move arithmetic past a change of the environment.
template <class Level, typename... Parameters, typename... Arguments>
void with_flushes(void (*body)(Parameters...), Arguments... arguments) {
  const unsigned int environment = Level::environment();
  Level::set_environment(environment | Level::kFlushes);
  body(arguments...);
  Level::set_environment(environment);
}

// rcp_approx_ftz() of numbers >= 0 and NaN.
template <class Level>
typename Level::Floats rcp_approx(typename Level::Floats x) {
  using Floats = typename Level::Floats;
  constexpr int32_t kOne = 0x3F800000;
  constexpr int32_t kInfinity = 0x7F800000;
  constexpr int32_t kSmallestNormal = 0x00800000;
  const auto bits = Level::bits(x);
  const auto mantissa = Level::bit_and(bits, 0x7FFFFF);
  const Floats quotient =
      Level::div(Level::floats(1.0F), Level::floats(Level::add(mantissa, Level::ints(kOne))));
  // 16 entries in 32 bits.
  const auto entries =
      Level::gather(narrowfloat_rcp_delta_table, Level::template shift_right<4>(mantissa));
  const auto place = Level::template shift_left<1>(Level::bit_and(mantissa, 15));
  const auto entry = Level::bit_and(Level::shift_right_by(entries, place), 3);
  const auto difference =
      Level::sub(Level::bit_and(entry, 1), Level::template shift_right<1>(entry));
  const auto exponent = Level::sub(bits, mantissa);
  auto result = Level::sub(
      Level::add(Level::bits(quotient), Level::add(difference, Level::ints(kOne))), exponent);
  result =
      Level::select(Level::greater(Level::ints(kSmallestNormal), result), Level::ints(0), result);
  result = Level::select(Level::greater(Level::ints(kSmallestNormal), bits), Level::ints(kInfinity),
                         result);
  result = Level::select(Level::greater(bits, Level::ints(kInfinity - 1)), Level::ints(0), result);
  result = Level::select(Level::greater(bits, Level::ints(kInfinity)), bits, result);
  return Level::floats(result);
}

}  // namespace narrowfloat::fast_math_text
