// Division by a number that is known before a kernel starts, as one multiplication and a shift
// (Granlund and Montgomery, PLDI 1994). Kernels split a flat index into row and column with it: an
// integer division instruction sequence costs more than the rest of the addressing.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace narrowfloat {

class FastDivisor {
 public:
  FastDivisor() = default;
  // 1 <= divisor < 2^31.
  explicit constexpr FastDivisor(uint32_t divisor) : divisor_(divisor) {
    while (shift_ < 31 && (1U << shift_) < divisor) ++shift_;
    // ceil(2^(32 + shift) / divisor) - 2^32 fits 32 bits as 2^shift < 2 * divisor.
    const uint64_t power = uint64_t{1} << shift_;
    multiplier_ = static_cast<uint32_t>(((power - divisor) << 32) / divisor + 1);
  }

  // value < 2^31.
  [[nodiscard]] NF_HOST_DEVICE constexpr uint32_t quotient(uint32_t value) const {
    const auto high = static_cast<uint32_t>((static_cast<uint64_t>(value) * multiplier_) >> 32);
    return (high + value) >> shift_;
  }
  [[nodiscard]] NF_HOST_DEVICE constexpr uint32_t divisor() const { return divisor_; }

 private:
  uint32_t divisor_ = 1;
  uint32_t multiplier_ = 1;
  uint32_t shift_ = 0;
};

}  // namespace narrowfloat
