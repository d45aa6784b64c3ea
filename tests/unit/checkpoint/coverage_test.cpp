// The set of written byte ranges.
#include "checkpoint/coverage.h"

#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace narrowfloat {
namespace {

TEST(Coverage, MergesRangesThatTouchOrOverlap) {
  Coverage coverage;
  EXPECT_EQ(coverage.first_gap(5), 5U);
  coverage.add(10, 20);
  coverage.add(30, 40);
  EXPECT_EQ(coverage.first_gap(10), 20U);
  coverage.add(20, 25);
  EXPECT_EQ(coverage.first_gap(10), 25U);
  coverage.add(15, 35);
  EXPECT_EQ(coverage.first_gap(10), 40U);
  coverage.add(12, 13);
  EXPECT_EQ(coverage.first_gap(10), 40U);
  coverage.add(50, 50);
  EXPECT_EQ(coverage.first_gap(50), 50U);
}

TEST(Coverage, AgreesWithAByteMapOnRandomRanges) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    Coverage coverage;
    std::vector<bool> bytes(101, false);
    for (int i = 0; i < 12; ++i) {
      const uint64_t begin = random() % 90;
      const uint64_t end = begin + random() % 11;
      coverage.add(begin, end);
      for (uint64_t at = begin; at < end; ++at) bytes[at] = true;
    }
    for (uint64_t begin = 0; begin <= 100; ++begin) {
      uint64_t gap = begin;
      while (bytes[gap]) ++gap;
      ASSERT_EQ(coverage.first_gap(begin), gap) << "round " << round << " from " << begin;
    }
  }
}

}  // namespace
}  // namespace narrowfloat
