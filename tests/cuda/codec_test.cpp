// The codecs of every format on the GPU against the host, bit for bit: all 2^16 inputs of both
// 16-bit types beside many maxima and scales, every maximum, values one ulp around ties, specials
// in every position, and a million generated blocks in every shape of launch.
#include <cmath>

#include <fmt/format.h>

#include "base/host_device.h"
#include "cuda/gpu_test.h"
#include "cuda/host_comparison.h"
#include "support/environment.h"
#include "tensor/block_math.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kAllInputs = 1 << 16;
constexpr auto kHalfTypes = {DType::kBF16, DType::kF16};

void expect_same(const Matrix& input, const QuantizeVariant& variant, std::string_view note) {
  EXPECT_EQ(compare_with_host(input, variant), "") << variant.name << ", " << note;
}

// Elements to a block of scales, of a format whose blocks lie inside rows; 128 for the others.
int64_t block_of(FormatId format) {
  const int64_t cols = format_info(format).block_cols;
  return cols == 0 ? 128 : cols;
}

// A finite value > 0 that has mantissa `index` of all, for bf16; fp16 gets every eighth.
uint16_t anchor_bits(DType dtype, int64_t index, bool is_moderate, Random& random) {
  const bool is_bf16 = dtype == DType::kBF16;
  const int64_t bias = is_bf16 ? 127 : 15;
  const int64_t exponent =
      is_moderate ? bias + random.range(-9, 9) : random.range(0, is_bf16 ? 254 : 30);
  const int64_t mantissa = is_bf16 ? index % 128 : index % 128 * 8 + random.range(0, 7);
  const int64_t bits = exponent << (is_bf16 ? 7 : 10) | mantissa;
  return static_cast<uint16_t>(std::max<int64_t>(1, bits));
}

// In each row all inputs by magnitude, `block` - 1 in a block, and one more element in each block,
// in changing places: the row's anchor, which is the maximum as long as the others are below it.
// A bounded matrix has zeros in place of what is above its row's anchor, for formats whose scales
// range over more than a block.
Matrix all_inputs(DType dtype, int64_t block, bool is_bounded) {
  constexpr int64_t kRows = 128;
  const int64_t blocks = (kAllInputs + block - 2) / (block - 1);
  const int64_t cols = (blocks * block + 127) / 128 * 128;
  Matrix matrix({.dtype = dtype, .rows = kRows, .cols = cols}, {.poison = 0});
  Random random(17);
  for (int64_t row = 0; row < kRows; ++row) {
    const uint16_t anchor = anchor_bits(dtype, row, is_bounded, random);
    auto* elements = static_cast<uint16_t*>(matrix.row(row));
    int64_t input = 0;
    for (int64_t i = 0; i < blocks; ++i) {
      for (int64_t j = 0; j < block; ++j) {
        uint16_t& element = elements[i * block + j];
        if (j == i % block) {
          element = anchor;
        } else if (input < kAllInputs) {
          element = static_cast<uint16_t>(input / 2 | input % 2 << 15);
          if (is_bounded && input / 2 > anchor) element = 0;
          ++input;
        }
      }
    }
  }
  return matrix;
}

class GpuCodecs : public GpuTest, public ::testing::WithParamInterface<DType> {};

TEST_P(GpuCodecs, AllInputsBesideManyMaxima) {
  for (const int64_t block : {16, 32, 128}) {
    const Matrix all = all_inputs(GetParam(), block, false);
    const Matrix bounded = all_inputs(GetParam(), block, true);
    for (const QuantizeVariant& variant : all_variants()) {
      if (block_of(variant.to.format) != block) continue;
      expect_same(all, variant, "all inputs");
      expect_same(bounded, variant, "inputs up to a row's maximum");
    }
  }
}

// One block for each maximum, zero and infinity included; elements of all sizes below it.
TEST_P(GpuCodecs, EveryMaximum) {
  const int64_t last = GetParam() == DType::kBF16 ? 0x7F80 : 0x7C00;
  constexpr int64_t kCols = 128 * 64;
  for (const int64_t block : {16, 32, 128}) {
    const int64_t per_row = kCols / block;
    const Matrix matrix({.dtype = GetParam(), .rows = last / per_row + 1, .cols = kCols},
                        {.poison = 0});
    Random random(5);
    for (int64_t maximum = 0; maximum <= last; ++maximum) {
      auto* elements = static_cast<uint16_t*>(matrix.row(maximum / per_row));
      elements += maximum % per_row * block;
      for (int64_t j = 0; j < block; ++j) {
        const int64_t bits = std::max<int64_t>(0, maximum - random.range(0, 600));
        elements[j] = static_cast<uint16_t>(bits | random.range(0, 1) << 15);
      }
      elements[random.range(0, block - 1)] =
          static_cast<uint16_t>(maximum | random.range(0, 1) << 15);
    }
    for (const QuantizeVariant& variant : all_variants()) {
      if (block_of(variant.to.format) == block) expect_same(matrix, variant, "every maximum");
    }
  }
}

// Bits of both signs of NaN (quiet and signalling), infinities, zeros and extremes.
std::vector<uint16_t> specials(DType dtype) {
  std::vector<uint16_t> bits{0x0000, 0x0001, 0x007F, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF};
  if (dtype == DType::kF16) bits = {0x0000, 0x0001, 0x03FF, 0x7BFF, 0x7C00, 0x7C01, 0x7E00, 0x7FFF};
  for (size_t i = 0; i < 8; ++i) bits.push_back(static_cast<uint16_t>(bits[i] | 0x8000U));
  return bits;
}

// Blocks of one special in each position, and of one more in a position of its own.
TEST_P(GpuCodecs, SpecialsInEveryPosition) {
  const std::vector<uint16_t> all = specials(GetParam());
  for (const int64_t block : {16, 32, 128}) {
    const int64_t rows = static_cast<int64_t>(all.size()) * 4;
    const Matrix matrix = Matrix::filled({.dtype = GetParam(), .rows = rows, .cols = block * block},
                                         Fill::kNormalRows, 9);
    Random random(11);
    for (int64_t row = 0; row < rows; ++row) {
      auto* elements = static_cast<uint16_t*>(matrix.row(row));
      for (int64_t i = 0; i < block; ++i) {
        elements[i * block + i] = all[static_cast<size_t>(row) % all.size()];
        if (row % 4 >= 2) {
          elements[i * block + random.range(0, block - 1)] =
              random.pick(std::span<const uint16_t>(all));
        }
      }
    }
    for (const QuantizeVariant& variant : all_variants()) {
      if (block_of(variant.to.format) == block) expect_same(matrix, variant, "specials");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuCodecs, ::testing::ValuesIn(kHalfTypes),
                         [](const auto& test) { return std::string(name(test.param)); });

// Each row has its own encode scale, chosen so that one value times the block's multiplier falls on
// a tie of E2M1 or a few ulps beside it.
TEST_F(GpuTest, ValuesAroundTiesRoundAsOnTheHost) {
  constexpr int64_t kRows = 8192;
  constexpr int64_t kCols = 128;
  const Matrix matrix({.rows = kRows, .cols = kCols});
  std::vector<float> encode_scales;
  Random random(23);
  int64_t close = 0;
  for (int64_t row = 0; row < kRows; ++row) {
    const float tie = random.pick({0.25F, 0.75F, 1.25F, 1.75F, 2.5F, 3.5F, 5.0F});
    const float value = std::ldexp(static_cast<float>(128 + random.range(0, 127)),
                                   static_cast<int>(random.range(-20, 10)));
    const float scale = static_cast<float>(random.range(8, 15)) / 8.0F;
    const auto ulps = static_cast<uint32_t>(random.range(-3, 3));
    const float encode_scale = bits_float(float_bits(scale * tie / value) + ulps);
    encode_scales.push_back(encode_scale);
    const float product = value * (1.0F / (scale * (1.0F / encode_scale)));
    close += std::abs(product / tie - 1.0F) <= 0x1p-22F ? 1 : 0;
    for (int64_t col = 0; col < kCols; ++col) {
      const float near = bits_float(float_bits(value) + (col % 5 == 0 ? 0x10000U : 0U));
      matrix.set(row, col,
                 col % 16 == col / 16 ? 6.0F * value / tie
                 : col % 2 == 0       ? near
                                      : -value);
    }
  }
  EXPECT_GT(close, kRows / 2);
  for (const QuantizeVariant& variant : default_variants()) {
    if (variant.to.format != FormatId::kNvfp4) continue;
    EXPECT_EQ(compare_with_host(matrix, variant, encode_scales), "") << variant.name;
  }
}

// Rows of all fills, one after another.
Matrix mixed(DType dtype, int64_t rows, int64_t cols, uint64_t seed) {
  Matrix matrix({.dtype = dtype, .rows = rows, .cols = cols});
  Random random(seed);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t fill = rows < kNumFills ? random.range(0, kNumFills - 1) : row % kNumFills;
    fill_elements(static_cast<Fill>(fill), dtype, random, cols, matrix.row(row));
  }
  return matrix;
}

// Kernels choose how they go about it by the shape: all of it must give the same bytes.
TEST_F(GpuTest, GeneratedBlocksOfEveryShapeGiveTheHostsBytes) {
  const auto shapes = {std::pair<int64_t, int64_t>{1, 7168},
                       {1, 128},
                       {3, 16384},
                       {16, 2048},
                       {32, 7168},
                       {33, 2880},
                       {128, 7168},
                       {129, 1536},
                       {257, 4128},
                       {1000, 288},
                       {1024, 4096},
                       {4096, 2048}};
  const std::vector<QuantizeVariant> variants = default_variants();
  for (const DType dtype : kHalfTypes) {
    for (const auto& [rows, cols] : shapes) {
      const Matrix matrix = mixed(dtype, rows, cols, static_cast<uint64_t>(rows + cols));
      for (const QuantizeVariant& variant : variants) {
        expect_same(matrix, variant, fmt::format("{} {}x{}", name(dtype), rows, cols));
      }
    }
  }
}

}  // namespace
}  // namespace narrowfloat::testing
