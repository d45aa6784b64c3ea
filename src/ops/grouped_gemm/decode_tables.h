// Tables of the values of codes, for the loops of cpu_baseline.
#pragma once

#include <array>
#include <cstdint>

#include "formats/minifloat.h"

namespace narrowfloat {

// g++ exports an instance of a variable template of standard types unless it is told not to.
template <typename Real>
[[gnu::visibility("hidden")]] inline constexpr auto kE4M3Values = [] {
  std::array<Real, 256> values{};
  for (size_t code = 0; code < values.size(); ++code) {
    values[code] = static_cast<Real>(E4M3::decode(static_cast<uint8_t>(code)));
  }
  return values;
}();

template <typename Real>
struct CodePair {
  Real low;
  Real high;
};

// The values of both nibbles of a byte.
template <typename Real>
inline constexpr auto kE2M1Pairs = [] {
  std::array<CodePair<Real>, 256> pairs{};
  for (size_t code = 0; code < pairs.size(); ++code) {
    pairs[code] = {static_cast<Real>(E2M1::decode(static_cast<uint8_t>(code & 0xF))),
                   static_cast<Real>(E2M1::decode(static_cast<uint8_t>(code >> 4)))};
  }
  return pairs;
}();

}  // namespace narrowfloat
