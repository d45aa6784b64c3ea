// The fixed summation tree of RMSNorm (spec 6.12) against a recursive evaluation, and the steps
// around it.
#include "formats/rms_norm.h"

#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace narrowfloat {
namespace {

std::vector<float> random_row(size_t length, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> row(length);
  for (float& x : row) x = std::ldexp(static_cast<float>(random() & 0xFFFFU), -10) - 31.0F;
  return row;
}

// Leaf i: elements 8i .. 8i+7 in order, each one fused multiply-add.
float leaf(const std::vector<float>& row, size_t index) {
  float sum = 0.0F;
  for (size_t i = 8 * index; i < 8 * index + 8 && i < row.size(); ++i) {
    sum = std::fma(row[i], row[i], sum);
  }
  return sum;
}

// The subtree of leaves [first, first + size), size a power of two; absent leaves are +0.
float tree(const std::vector<float>& row, size_t first, size_t size) {
  if (8 * first >= row.size()) return 0.0F;
  if (size == 1) return leaf(row, first);
  return tree(row, first, size / 2) + tree(row, first + size / 2, size / 2);
}

float recursive_sum(const std::vector<float>& row) {
  size_t leaves = 1;
  while (8 * leaves < row.size()) leaves *= 2;
  return tree(row, 0, leaves);
}

float library_sum(const std::vector<float>& row, size_t chunk) {
  RmsNormSum sum;
  for (size_t first = 0; first < row.size(); first += chunk) {
    sum.add(std::span(row).subspan(first, std::min(chunk, row.size() - first)));
  }
  return sum.total();
}

TEST(RmsNormSum, IsTheTreeForEveryLengthUpTo1100) {
  for (size_t length = 0; length <= 1100; ++length) {
    const std::vector<float> row = random_row(length, static_cast<uint32_t>(length));
    ASSERT_EQ(float_bits(library_sum(row, 2048)), float_bits(recursive_sum(row))) << length;
  }
}

TEST(RmsNormSum, IsTheTreeForModelWidths) {
  for (const size_t length : {2048U, 2880U, 4096U, 5120U, 7168U, 8200U, 16384U, 65544U}) {
    const std::vector<float> row = random_row(length, 7);
    EXPECT_EQ(float_bits(library_sum(row, 256)), float_bits(recursive_sum(row))) << length;
  }
}

TEST(RmsNormSum, DoesNotDependOnTheChunksItIsFed) {
  const std::vector<float> row = random_row(1000, 9);
  const float expected = recursive_sum(row);
  for (const size_t chunk : {8U, 16U, 24U, 256U, 1000U}) {
    EXPECT_EQ(float_bits(library_sum(row, chunk)), float_bits(expected)) << chunk;
  }
}

TEST(RmsNormSum, DiffersFromOneRunningSum) {
  int differing = 0;
  for (uint32_t seed = 0; seed < 20; ++seed) {
    const std::vector<float> row = random_row(4096, seed);
    float running = 0.0F;
    for (const float x : row) running = std::fma(x, x, running);
    differing += running != library_sum(row, 256) ? 1 : 0;
  }
  EXPECT_GT(differing, 10);
}

TEST(RmsNormSum, FusesMultiplyAndAddInALeaf) {
  int differing = 0;
  for (uint32_t seed = 0; seed < 100; ++seed) {
    const std::vector<float> row = random_row(8, seed);
    float unfused = 0.0F;
    for (const float x : row) unfused += x * x;
    ASSERT_EQ(float_bits(library_sum(row, 8)), float_bits(leaf(row, 0)));
    differing += unfused != library_sum(row, 8) ? 1 : 0;
  }
  EXPECT_GT(differing, 10);
}

TEST(ReciprocalRms, RoundsEveryStep) {
  EXPECT_EQ(reciprocal_rms_of_sum(64.0F, 64, 0.0F), 1.0F);
  EXPECT_EQ(reciprocal_rms_of_sum(0.0F, 64, 0.25F), 2.0F);
  const float mean = 1234.5F / 100.0F;
  const auto expected = static_cast<float>(1.0 / std::sqrt(static_cast<double>(mean + 1e-6F)));
  EXPECT_EQ(reciprocal_rms_of_sum(1234.5F, 100, 1e-6F), expected);
  EXPECT_EQ(reciprocal_rms_of_sum(0.0F, 64, 0.0F), std::numeric_limits<float>::infinity());
}

TEST(RmsNormElement, CountsANegativeZeroWeightAsPositive) {
  EXPECT_EQ(float_bits(rms_norm_element(2.0F, 0.5F, -0.0F)), 0U);
  EXPECT_EQ(float_bits(rms_norm_element(-2.0F, 0.5F, -0.0F)), 0x80000000U);
  EXPECT_EQ(rms_norm_element(3.0F, 0.1F, 7.0F), 3.0F * 0.1F * 7.0F);
}

}  // namespace
}  // namespace narrowfloat
