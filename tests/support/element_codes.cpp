// See element_codes.h.
#include "support/element_codes.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>

namespace narrowfloat::testing {

double decode_e2m1(unsigned code) {
  constexpr std::array kMagnitudes{0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};
  return (code & 8U) != 0 ? -kMagnitudes[code & 7U] : kMagnitudes[code & 7U];
}

double decode_e4m3(unsigned code) {
  const unsigned exponent = (code >> 3) & 0xFU;
  const unsigned mantissa = code & 7U;
  if ((code & 0x7FU) == 0x7FU) return std::numeric_limits<double>::quiet_NaN();
  const double magnitude = exponent == 0
                               ? std::ldexp(mantissa, -9)
                               : std::ldexp(8.0 + mantissa, static_cast<int>(exponent) - 10);
  return (code & 0x80U) != 0 ? -magnitude : magnitude;
}

double nearest_e4m3(double value) {
  static const auto kMagnitudes = [] {
    std::array<double, 127> magnitudes{};  // Ascending, as the codes are.
    for (unsigned code = 0; code < 127; ++code) magnitudes[code] = decode_e4m3(code);
    return magnitudes;
  }();
  if (std::isnan(value)) return value;
  const double magnitude = std::abs(value);
  const auto* above = std::lower_bound(kMagnitudes.begin(), kMagnitudes.end(), magnitude);
  if (above == kMagnitudes.end()) return std::copysign(kMagnitudes.back(), value);
  if (above == kMagnitudes.begin()) return value;
  const auto* below = above - 1;
  const double up = *above - magnitude;
  const double down = magnitude - *below;
  const bool above_is_even = (above - kMagnitudes.begin()) % 2 == 0;
  const bool goes_up = up < down || (up == down && above_is_even);
  return std::copysign(goes_up ? *above : *below, value);
}

double bf16_value(uint16_t code) {
  const uint32_t bits = static_cast<uint32_t>(code) << 16;
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

uint16_t bf16_of_exact(double value) {
  const auto narrow = static_cast<float>(value);
  uint32_t bits = 0;
  std::memcpy(&bits, &narrow, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

uint8_t e4m3_of_exact(double value) {
  static const std::map<double, uint8_t> kCodes = [] {
    std::map<double, uint8_t> codes;
    for (unsigned code = 0; code < 256; ++code) {
      if ((code & 0x7FU) != 0x7FU) codes.emplace(decode_e4m3(code), static_cast<uint8_t>(code));
    }
    return codes;
  }();
  return kCodes.at(value);
}

}  // namespace narrowfloat::testing
