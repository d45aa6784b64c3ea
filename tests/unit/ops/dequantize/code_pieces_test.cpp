// The integer steps of the GPU dequantizer against the formats and the grouped rows of the oracle.
#include "ops/dequantize/code_pieces.h"

#include <vector>

#include <gtest/gtest.h>

#include "formats/minifloat.h"
#include "support/random.h"
#include "tensor/grouped_rows.h"

namespace narrowfloat::testing {
namespace {

TEST(CodePieces, E2m1AsE4m3IsASixtyFourthWithItsSign) {
  for (uint32_t byte = 0; byte < 256; ++byte) {
    for (uint32_t at = 0; at < 32; at += 8) {
      // Every other byte of the word must not interfere.
      for (const uint32_t others : {0x00000000U, 0xFFFFFFFFU}) {
        const uint32_t packed = (others & ~(0xFFU << at)) | byte << at;
        const auto even = static_cast<uint8_t>(even_codes_as_e4m3(packed) >> at);
        const auto odd = static_cast<uint8_t>(odd_codes_as_e4m3(packed) >> at);
        EXPECT_EQ(float_bits(E4M3::decode(even) * kE2m1InE4m3),
                  float_bits(E2M1::decode(static_cast<uint8_t>(byte & 0xFU))));
        EXPECT_EQ(float_bits(E4M3::decode(odd) * kE2m1InE4m3),
                  float_bits(E2M1::decode(static_cast<uint8_t>(byte >> 4))));
      }
    }
  }
}

TEST(CodePieces, ClampedScaleRowIsTheScaleRowOfCheckedOffsets) {
  Random random(1);
  for (int trial = 0; trial < 500; ++trial) {
    const int64_t groups = random.range(1, 20);
    std::vector<int64_t> offsets{0};
    for (int64_t i = 0; i < groups; ++i) {
      offsets.push_back(offsets.back() + (random.chance(30) ? 0 : random.range(0, 70)));
    }
    const int64_t rows = offsets.back();
    const int64_t scale_rows = grouped_scale_row(rows, groups);
    for (int64_t row = 0; row < rows; ++row) {
      ASSERT_EQ(clamped_scale_row(offsets.data(), groups, row, scale_rows),
                scale_row(offsets, row));
    }
  }
}

TEST(CodePieces, ClampedScaleRowStaysInsideTheScalesWhateverTheOffsetsAre) {
  Random random(2);
  for (int trial = 0; trial < 20000; ++trial) {
    std::vector<int64_t> offsets(static_cast<size_t>(random.range(2, 9)));
    for (int64_t& offset : offsets) {
      offset = random.pick<int64_t>({static_cast<int64_t>(random.bits()), INT64_MIN, INT64_MAX, -1,
                                     random.range(-50, 400), 0});
    }
    const int64_t scale_rows = random.range(1, 500);
    const int64_t row = clamped_scale_row(offsets.data(), static_cast<int64_t>(offsets.size()) - 1,
                                          random.range(0, 400), scale_rows);
    ASSERT_TRUE(row >= 0 && row < scale_rows);
  }
}

}  // namespace
}  // namespace narrowfloat::testing
