// Decodes E4M3 and UE8M0 codes, one a lane: text that sources for a level of vector instructions
// compile (docs/architecture.md, levels of vector instructions).
//
// Level is a type of an unnamed namespace; it has vectors of fp32 (Floats) and of 32-bit integers
// (Ints), and elementary operations on them.
#pragma once

#include <cstdint>

namespace narrowfloat::decode_text {

inline constexpr int32_t kCanonicalNan = 0x7FFFFFFF;

// The exponent field of an E4M3 code is 120 less than that of its value; the product with 2^120 is
// exact, for denormals, too. NaN keeps the code's sign.
template <class Level>
typename Level::Floats decode_e4m3(typename Level::Ints codes) {
  const auto field = Level::bit_and(Level::template shift_left<20>(codes), 0x07F00000);
  const auto magnitude = Level::bits(Level::mul(Level::floats(field), Level::floats(0x1p120F)));
  const auto is_nan = Level::equal(field, Level::ints(0x07F00000));
  const auto number = Level::select(is_nan, Level::ints(kCanonicalNan), magnitude);
  const auto sign = Level::bit_and(Level::template shift_left<24>(codes), INT32_MIN);
  return Level::floats(Level::bit_or(number, sign));
}

template <class Level>
typename Level::Floats decode_ue8m0(typename Level::Ints codes) {
  constexpr int32_t kSmallest = 0x00400000;  // 2^-127, a denormal.
  auto bits = Level::template shift_left<23>(codes);
  bits = Level::select(Level::equal(codes, Level::ints(0)), Level::ints(kSmallest), bits);
  return Level::floats(
      Level::select(Level::equal(codes, Level::ints(255)), Level::ints(kCanonicalNan), bits));
}

}  // namespace narrowfloat::decode_text
