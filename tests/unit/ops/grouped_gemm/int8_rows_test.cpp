// Blocks of rows in int8: what a block's scale and codes are, and what does not fit int8.
#include "ops/grouped_gemm/int8_rows.h"

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "formats/float16.h"
#include "ops/grouped_gemm/grouped_gemm_problem.h"
#include "support/gemm_case.h"

namespace narrowfloat::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

Int8Block block_of(float largest) {
  const std::array<float, 3> values{0.0F, -largest, largest / 3};
  return int8_block(values.data(), 3);
}

TEST(Int8Rows, TheLargestMagnitudeIs127) {
  for (const float largest : {0x1p-100F, 1.0F, 3.14159F, 448.0F, 0x1.FEp127F}) {
    const Int8Block block = block_of(largest);
    EXPECT_EQ(int8_code(largest, block), 127.0F) << largest;
    EXPECT_EQ(int8_code(-largest, block), -127.0F) << largest;
    EXPECT_NEAR(2 * block.half_scale * 127 / largest, 1, 1e-6) << largest;
  }
}

TEST(Int8Rows, CodesAreTheNearestIntegers) {
  const Int8Block block = block_of(127.0F);  // Its scale is 1.
  EXPECT_EQ(block.half_scale, 0.5F);
  for (const float value : {0.0F, 0.25F, 0.5F, 1.5F, 2.5F, 99.49F, 126.5F}) {
    EXPECT_EQ(int8_code(value, block), std::nearbyint(value)) << value;
    EXPECT_EQ(int8_code(-value, block), std::nearbyint(-value)) << value;
  }
}

TEST(Int8Rows, ZerosAndTinyValuesHaveAFiniteScale) {
  for (const float largest : {0.0F, 0x1p-149F, 0x1p-126F, 0x1p-101F}) {
    const Int8Block block = block_of(largest);
    EXPECT_EQ(block.multiplier, 127 * 0x1p100F) << largest;
    EXPECT_GT(block.half_scale, 0x1p-108F) << largest;
    EXPECT_LE(int8_code(largest, block), 64.0F) << largest;
  }
  EXPECT_EQ(int8_code(0x1p-101F, block_of(0x1p-101F)), 64.0F);
}

TEST(Int8Rows, WhatIsNotFiniteHasNoCodes) {
  for (const float value : {kInfinity, -kInfinity, std::nanf("")}) {
    const Int8Block block = block_of(value);
    EXPECT_TRUE(std::isnan(block.half_scale)) << value;
    EXPECT_EQ(int8_code(value, block), 0.0F) << value;
    EXPECT_EQ(int8_code(1.0F, block), 0.0F) << value;
  }
}

// A row with an infinity or a NaN is NaN, the others keep their bits, and all implementations
// agree.
TEST(Int8Rows, WhatIsNotFiniteStaysInItsRow) {
  for (const MoeMode mode : {MoeMode::kMxfp4Int8, MoeMode::kNvfp4Int8}) {
    GemmCase gemm({.mode = mode, .cols = 96, .expert_rows = {20}, .token_tile = 32});
    const auto clean = gemm.run({.implementation = "cpu_reference"});
    const std::array<std::pair<int64_t, uint16_t>, 3> planted{
        {{1, float_to_bf16(kInfinity)}, {5, float_to_bf16(-kInfinity)}, {17, uint16_t{0x7FC0}}}};
    for (const auto& [row, code] : planted) {
      std::memcpy(&gemm.input_codes[static_cast<size_t>((row * 96 + 40) * 2)], &code, 2);
    }
    for (const GroupedGemmImpl& impl : grouped_gemm_impls()) {
      if (!impl.supports({.mode = mode}).ok()) continue;
      const auto output = gemm.run({.implementation = std::string(impl.name)});
      for (int64_t row = 0; row < 20; ++row) {
        const bool is_planted = row == 1 || row == 5 || row == 17;
        for (int64_t n = 0; n < 32; ++n) {
          const double got = output_element(DType::kF32, output, row * 32 + n);
          const double expected = output_element(DType::kF32, clean, row * 32 + n);
          ASSERT_TRUE(is_planted ? std::isnan(got) : got == expected)
              << impl.name << " row " << row << ": " << got << " for " << expected;
        }
      }
    }
  }
}

}  // namespace
}  // namespace narrowfloat::testing
