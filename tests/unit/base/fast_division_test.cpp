// FastDivisor against the division it replaces.
#include "base/fast_division.h"

#include <gtest/gtest.h>

#include "support/random.h"

namespace narrowfloat::testing {
namespace {

constexpr uint32_t kLargest = (1U << 31) - 1;

TEST(FastDivisor, GivesTheQuotientAroundEveryMultiple) {
  for (uint32_t divisor = 1; divisor < 3000; ++divisor) {
    const FastDivisor fast(divisor);
    for (uint32_t i = 1; i < 200; ++i) {
      const uint32_t multiple = divisor * i;
      ASSERT_EQ(fast.quotient(multiple - 1), i - 1) << divisor;
      ASSERT_EQ(fast.quotient(multiple), i) << divisor;
    }
    ASSERT_EQ(fast.quotient(kLargest), kLargest / divisor) << divisor;
  }
}

TEST(FastDivisor, GivesTheQuotientOfRandomOperands) {
  Random random(7);
  for (int i = 0; i < 1000000; ++i) {
    const auto divisor =
        static_cast<uint32_t>(random.range(1, int64_t{1} << random.range(1, 31)) % kLargest + 1);
    const auto value = static_cast<uint32_t>(random.range(0, kLargest));
    ASSERT_EQ(FastDivisor(divisor % kLargest + 1).quotient(value), value / (divisor % kLargest + 1))
        << value << " / " << divisor;
  }
}

}  // namespace
}  // namespace narrowfloat::testing
