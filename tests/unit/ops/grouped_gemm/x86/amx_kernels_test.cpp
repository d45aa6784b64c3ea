// The kernel for matrix tiles with tiles in plain memory: few machines have real ones, on which
// grouped_gemm_test.cpp runs it within its operation.
#include <array>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "formats/float16.h"
#include "ops/grouped_gemm/x86/amx_kernels_text.h"

namespace narrowfloat {
namespace {

struct PlainTile {
  int64_t rows = 0;
  int64_t row_bytes = 0;
  std::array<std::array<uint8_t, 64>, 16> bytes{};
};

// Refuses extents that a processor would refuse.
struct PlainTiles {
  static inline std::array<PlainTile, 8> tiles;
  static inline bool is_configured = false;

  static void set(size_t tile, int64_t rows, int64_t row_bytes) {
    ASSERT_LE(rows, 16);
    ASSERT_LE(row_bytes, 64);
    tiles[tile] = {.rows = rows, .row_bytes = rows == 0 ? 0 : row_bytes, .bytes = {}};
  }
  static void configure(const amx_kernels::TileShape& shape) {
    for (size_t i = 0; i < 2; ++i) {
      for (const size_t sums : {2 * i, 2 * i + 1}) set(sums, shape.rows[i], 64);
      set(4 + i, shape.rows[i], 2 * shape.step);
      set(6 + i, shape.step / 2, 64);
    }
    is_configured = true;
  }
  static void release() { is_configured = false; }
  static void fence() {}
  static PlainTile& tile(size_t index) {
    EXPECT_TRUE(is_configured);
    EXPECT_GT(tiles[index].rows, 0) << "tile " << index << " has no extents";
    return tiles[index];
  }
  template <int kTile>
  static void zero() {
    tile(kTile).bytes = {};
  }
  template <int kTile>
  static void load(const uint16_t* from, int64_t stride) {
    PlainTile& to = tile(kTile);
    for (int64_t row = 0; row < to.rows; ++row) {
      std::memcpy(to.bytes[static_cast<size_t>(row)].data(),
                  reinterpret_cast<const uint8_t*>(from) + row * stride,
                  static_cast<size_t>(to.row_bytes));
    }
  }
  template <int kTile>
  static void store(float* to, int64_t stride) {
    const PlainTile& from = tile(kTile);
    for (int64_t row = 0; row < from.rows; ++row) {
      std::memcpy(reinterpret_cast<uint8_t*>(to) + row * stride,
                  from.bytes[static_cast<size_t>(row)].data(), static_cast<size_t>(from.row_bytes));
    }
  }
  template <typename T>
  static T element(const PlainTile& tile, int64_t row, int64_t index) {
    T value;
    std::memcpy(&value, tile.bytes[static_cast<size_t>(row)].data() + index * sizeof(T), sizeof(T));
    return value;
  }
  template <int kSums>
  static void multiply() {
    PlainTile& sums = tile(kSums);
    const PlainTile& rows = tile(4 + kSums / 2);
    const PlainTile& weights = tile(6 + kSums % 2);
    ASSERT_EQ(rows.row_bytes, weights.rows * 4);
    for (int64_t m = 0; m < sums.rows; ++m) {
      for (int64_t n = 0; n < 16; ++n) {
        std::array<float, 2> of_pairs{};
        for (int64_t k = 0; k < weights.rows * 2; ++k) {
          const float x = bf16_to_float(element<uint16_t>(rows, m, k));
          const float w = bf16_to_float(element<uint16_t>(weights, k / 2, 2 * n + k % 2));
          float& sum = of_pairs[static_cast<size_t>(k % 2)];
          sum = std::fma(x, w, sum);
        }
        const float sum = element<float>(sums, m, n) + (of_pairs[0] + of_pairs[1]);
        std::memcpy(sums.bytes[static_cast<size_t>(m)].data() + n * 4, &sum, sizeof(sum));
      }
    }
  }
  static void add_scaled(float* total, const float* weight_factors, const float* row_factor,
                         const float* inner) {
    for (int64_t i = 0; i < 16; ++i) {
      const float weight_factor = weight_factors == nullptr ? 1.0F : weight_factors[i];
      total[i] += weight_factor * (row_factor == nullptr ? 1.0F : *row_factor) * inner[i];
    }
  }
};

struct TileCase {
  int64_t strips;
  int64_t cols;
  int64_t block_cols;
  int64_t blocks_per_row_scale;  // 0: rows have no scales.
  int64_t rows;
};

size_t to_index(int64_t i) { return static_cast<size_t>(i); }

template <typename Vector>
auto& element_at(Vector& vector, int64_t i) {
  return vector[to_index(i)];
}

// Small integers, whose sums are exact.
class TileCaseData {
 public:
  explicit TileCaseData(const TileCase& shape) : shape_(shape) {
    blocks_ = shape.block_cols == 0 ? 1 : (shape.cols + shape.block_cols - 1) / shape.block_cols;
    weights_ = numbers(shape.strips * 16 * shape.cols, -6, 6);
    values_ = numbers(shape.rows * shape.cols, -9, 9);
    factors_ = numbers(shape.strips * 16 * blocks_, 1, 4);
    row_scales_ = numbers(shape.rows * blocks_, 1, 2);
    sums_ = numbers(shape.rows * shape.strips * 16, -100, 100);
  }

  // The sums after the products of the chunk were added to them.
  [[nodiscard]] std::vector<float> expected() const {
    std::vector<float> sums = sums_;
    for (int64_t m = 0; m < shape_.rows; ++m) {
      for (int64_t n = 0; n < shape_.strips * 16; ++n) {
        float& sum = element_at(sums, m * shape_.strips * 16 + n);
        for (int64_t k = 0; k < shape_.cols; ++k) {
          sum += element_at(values_, m * shape_.cols + k) *
                 element_at(weights_, n * shape_.cols + k) * factor(m, n, k);
        }
      }
    }
    return sums;
  }

  [[nodiscard]] std::vector<float> of_kernel() const {
    std::vector<float> sums = sums_;
    std::vector<uint16_t> values;
    for (const float value : values_) values.push_back(float_to_bf16(value));
    std::vector<std::vector<uint16_t>> strips;
    std::vector<std::vector<float>> factors;
    Bf16Chunk chunk{.strips = shape_.strips, .cols = shape_.cols, .block_cols = shape_.block_cols};
    chunk.blocks_per_row_scale = std::max<int64_t>(1, shape_.blocks_per_row_scale);
    for (int64_t strip = 0; strip < shape_.strips; ++strip) {
      std::vector<uint16_t>& weights = strips.emplace_back();
      for (int64_t i = 0; i < shape_.cols * 16; ++i) {
        const int64_t row = strip * 16 + i / 2 % 16;
        weights.push_back(
            float_to_bf16(element_at(weights_, row * shape_.cols + i / 32 * 2 + i % 2)));
      }
      std::vector<float>& of_strip = factors.emplace_back();
      for (int64_t i = 0; i < blocks_ * 16; ++i) {
        of_strip.push_back(element_at(factors_, (strip * 16 + i % 16) * blocks_ + i / 16));
      }
    }
    for (size_t strip = 0; strip < strips.size(); ++strip) {
      chunk.weights[strip] = strips[strip].data();
      chunk.factors[strip] = factors[strip].data();
    }
    std::vector<Bf16Row> rows;
    for (int64_t m = 0; m < shape_.rows; ++m) {
      rows.push_back({.values = values.data() + m * shape_.cols,
                      .scales = shape_.blocks_per_row_scale == 0
                                    ? nullptr
                                    : &row_scales_[to_index(m * blocks_)],
                      .sums = &sums[to_index(m * shape_.strips * 16)]});
    }
    amx_kernels::multiply<PlainTiles>(chunk, rows.data(), shape_.rows);
    return sums;
  }

 private:
  std::vector<float> numbers(int64_t count, int low, int high) {
    std::uniform_int_distribution<int> integer(low, high);
    std::vector<float> result;
    for (int64_t i = 0; i < count; ++i) result.push_back(static_cast<float>(integer(random_)));
    return result;
  }
  [[nodiscard]] float factor(int64_t m, int64_t n, int64_t k) const {
    const int64_t block = shape_.block_cols == 0 ? 0 : k / shape_.block_cols;
    const float weight_factor =
        shape_.block_cols == 0 ? 1.0F : element_at(factors_, n * blocks_ + block);
    if (shape_.blocks_per_row_scale == 0) return weight_factor;
    return weight_factor *
           element_at(row_scales_, m * blocks_ + block / shape_.blocks_per_row_scale);
  }

  TileCase shape_;
  int64_t blocks_;
  std::mt19937 random_{5};
  std::vector<float> weights_, values_, factors_, row_scales_, sums_;
};

TEST(AmxKernels, AddTheProductsOfEveryRowAndBlock) {
  for (const int64_t strips : {1, 2}) {
    for (const int64_t rows : {1, 15, 16, 17, 33, 128}) {
      for (const TileCase& shape : {TileCase{strips, 256, 32, 0, rows},   // MXFP4 x bf16
                                    TileCase{strips, 64, 32, 1, rows},    // MXFP4 x MXFP8
                                    TileCase{strips, 80, 16, 0, rows},    // NVFP4 x bf16
                                    TileCase{strips, 256, 16, 8, rows},   // NVFP4 x FP8
                                    TileCase{strips, 256, 128, 1, rows},  // FP8 1x128
                                    TileCase{strips, 144, 128, 1, rows},  // the last block is short
                                    TileCase{strips, 96, 0, 0, rows},     // bf16
                                    TileCase{strips, 48, 0, 0, rows}}) {  // no multiple of 32
        const TileCaseData data(shape);
        ASSERT_EQ(data.of_kernel(), data.expected())
            << strips << " strips, " << rows << " rows, " << shape.cols << " columns, blocks of "
            << shape.block_cols;
        ASSERT_FALSE(PlainTiles::is_configured) << "tiles are given up";
      }
    }
  }
}

}  // namespace
}  // namespace narrowfloat
