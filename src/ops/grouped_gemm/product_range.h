// Fused multiply-adds mostly have the bits of a multiplication and an addition: products of decoded
// values have at most 16 significant bits (moe spec 1.2), so a product within fp32's range is exact
// and rounds nothing. Only magnitudes at the ends of the range need the two operations.
//
//   x = a * 2^i, w = b * 2^j with 1 <= a, b < 2 and eight significant bits at most
//   x * w is a multiple of 2^(i + j - 14), and less than 2^(i + j + 2)
//
// The range of the weights is found as they are packed, that of the rows in every call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "base/float_ops.h"

namespace narrowfloat {

// The exponents j of some magnitudes; those of zeros, infinities and NaN do not count.
struct MagnitudeRange {
  int least = std::numeric_limits<int>::max();
  int most = std::numeric_limits<int>::min();

  void add(const MagnitudeRange& other) {
    least = std::min(least, other.least);
    most = std::max(most, other.most);
  }
  [[nodiscard]] bool is_empty() const { return least > most; }

  // A number that is not 0; decoded() gives the range back. An empty one becomes {0, 0}, since no
  // product of it rounds.
  [[nodiscard]] int encoded() const {
    return is_empty() ? kBias << 12 | kBias : (most + kBias) << 12 | (least + kBias);
  }
  static MagnitudeRange decoded(int encoding) {
    return {.least = (encoding & 0xFFF) - kBias, .most = (encoding >> 12) - kBias};
  }

 private:
  static constexpr int kBias = 1024;
};

// The bits of the magnitudes whose products with weights of a range are exact, besides zero.
class ExactFactors {
 public:
  explicit ExactFactors(const MagnitudeRange& weights)
      : least_(bits_of_power(std::max(-149 + 14 - weights.least, -126))),
        end_(bits_of_power(std::min(128 - 2 - weights.most + 1, 128))) {}

  [[nodiscard]] bool have_all(const float* x, int64_t count) const {
    // Without branches, as compilers need it for vectors.
    int32_t outside = 0;
    for (int64_t i = 0; i < count; ++i) {
      const auto magnitude = static_cast<int32_t>(float_bits(x[i]) & 0x7FFFFFFFU);
      const int32_t below = magnitude < least_ ? magnitude : 0;
      outside |= below | (magnitude < end_ ? 0 : 1);
    }
    return outside == 0;
  }

 private:
  // Beyond fp32's exponents the result is above or below the bits of all numbers.
  static int32_t bits_of_power(int exponent) {
    return static_cast<int32_t>((std::clamp(exponent, -127, 128) + 127) << 23);
  }

  int32_t least_;
  int32_t end_;
};

}  // namespace narrowfloat
