// Moving powers of two between codes and scales, against the values themselves.
#include "layers/exact_conversion.h"

#include <cmath>
#include <random>

#include "formats/minifloat.h"
#include "formats/ue8m0.h"
#include "unit/layers/model_files.h"

namespace narrowfloat {
namespace {

constexpr size_t kBlockBytes = 16;

float code_value(std::span<const std::byte> codes, size_t i) {
  const auto pair = static_cast<unsigned>(codes[i / 2]);
  return E2M1::decode(static_cast<uint8_t>(i % 2 == 0 ? pair & 0xFU : pair >> 4));
}

// Random blocks, whose codes are of a few magnitudes so that some of them can be doubled or halved.
struct Blocks {
  Blocks(std::mt19937& engine, size_t count, int span) : codes(count * kBlockBytes), scales(count) {
    for (size_t block = 0; block < count; ++block) {
      scales[block] = static_cast<std::byte>(100 + static_cast<int>(engine() % span));
      const unsigned first = engine() % 8;
      const unsigned second = engine() % 8;
      for (size_t i = 0; i < kBlockBytes; ++i) {
        const unsigned signs = engine() & 0x88U;
        codes[block * kBlockBytes + i] = static_cast<std::byte>(first | second << 4 | signs);
      }
    }
  }

  std::vector<std::byte> codes;
  std::vector<std::byte> scales;
};

TEST(ExactConversion, WindowsFitExactlyWhereAllValuesStay) {
  std::mt19937 engine(5);
  int num_exact = 0;
  int num_moved = 0;
  for (int run = 0; run < 2000; ++run) {
    const Blocks from(engine, 4, 16 + run % 16);
    PowerWindow window;
    ASSERT_EQ(window.add(from.codes, from.scales), -1);
    const int top = window.top();
    std::vector<std::byte> codes(from.codes.size());
    std::vector<std::byte> scales(2 * from.scales.size());
    mxfp4_to_nvfp4(from.codes, from.scales, top, 0x38, codes, scales);
    bool is_exact = true;
    for (size_t i = 0; i < codes.size() * 2; ++i) {
      const float scale = UE8M0::decode(static_cast<uint8_t>(from.scales[i / 32]));
      const float block_scale = E4M3::decode(static_cast<uint8_t>(scales[i / 16]));
      ASSERT_GT(block_scale, 0);
      const float value = code_value(codes, i) * std::ldexp(block_scale, top - 8);
      is_exact = is_exact && value == code_value(from.codes, i) * scale;
    }
    EXPECT_EQ(window.fits_under(top), is_exact);
    EXPECT_TRUE(is_exact || !window.fits());
    if (window.fits()) {
      EXPECT_EQ(codes, from.codes);
    }
    num_exact += is_exact ? 1 : 0;
    num_moved += is_exact && !window.fits() ? 1 : 0;
    // No other window is exact where this one is not.
    for (int other = top - 12; !is_exact && other <= top + 12; ++other) {
      EXPECT_FALSE(window.fits_under(other));
    }
  }
  EXPECT_GT(num_exact, 200);
  EXPECT_LT(num_exact, 1900);
  EXPECT_GT(num_moved, 50);
}

TEST(ExactConversion, BlocksOfZerosCountOnlyWithoutCodes) {
  const std::vector<std::byte> codes(2 * kBlockBytes, std::byte{0x80});
  const std::vector<std::byte> scales = {std::byte{0}, std::byte{254}};
  PowerWindow without;
  EXPECT_EQ(without.add({}, scales), -1);
  EXPECT_FALSE(without.fits());
  PowerWindow with;
  EXPECT_EQ(with.add(codes, scales), -1);
  EXPECT_TRUE(with.fits());
  EXPECT_EQ(with.top(), PowerWindow::kTopScaleExponent);
  const std::vector<std::byte> bad = {std::byte{3}, std::byte{255}};
  EXPECT_EQ(with.add(codes, bad), 1);
}

TEST(ExactConversion, PowersAreThoseOfUe8m0) {
  for (int code = 0; code <= UE8M0::kMaxCode; ++code) {
    EXPECT_EQ(exponent_of_power(UE8M0::decode(static_cast<uint8_t>(code))), code - 127);
  }
  for (const float value : {0.0F, -1.0F, 3.0F, 0x1p-128F, 0x1.8p-127F, INFINITY, NAN}) {
    EXPECT_FALSE(exponent_of_power(value).has_value()) << value;
  }
}

TEST(ExactConversion, ScalesOfTilesAreRepeated) {
  const std::vector<float> tiles = {1, 2, 4, 8};
  std::vector<std::byte> scales(130 * 5);
  spread_block_scales(std::as_bytes(std::span(tiles)), 130, 160, scales);
  for (size_t row = 0; row < 130; ++row) {
    for (size_t block = 0; block < 5; ++block) {
      const int exponent = (row < 128 ? 0 : 2) + (block < 4 ? 0 : 1);
      ASSERT_EQ(static_cast<int>(scales[row * 5 + block]), 127 + exponent);
    }
  }
}

}  // namespace
}  // namespace narrowfloat
