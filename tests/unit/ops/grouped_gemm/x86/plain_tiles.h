// Matrix tiles in plain memory, and the kernels of amx_kernels.h with them: few machines have real
// ones, on which grouped_gemm_test.cpp runs the kernels within their operation.
#pragma once

#include <array>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "base/int_math.h"
#include "formats/float16.h"
#include "ops/grouped_gemm/x86/scaled_tiles_text.h"
#include "support/index.h"

namespace narrowfloat {

struct PlainTile {
  int64_t rows = 0;
  int64_t row_bytes = 0;
  std::array<std::array<uint8_t, 64>, 16> bytes{};
};

// The place of a column among the elements of a run in tile order.
inline int64_t place_in_run(int64_t k) { return 2 * (k % 16 ^ 1) + k / 16; }

// A number as tiles take it.
inline float flushed(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0F, x) : x;
}

// Refuses extents that a processor would refuse.
struct PlainTiles {
  static inline std::array<PlainTile, 8> tiles;
  static inline bool is_configured = false;

  static void configure(int64_t first, int64_t second) {
    ASSERT_LE(first, 16);
    ASSERT_LE(second, 16);
    const std::array<int64_t, 8> rows{first, first, second, second, first, second, 16, 16};
    for (size_t i = 0; i < tiles.size(); ++i) {
      tiles[i] = {.rows = rows[i], .row_bytes = rows[i] == 0 ? 0 : 64, .bytes = {}};
    }
    is_configured = true;
  }
  static void release() { is_configured = false; }
  static void fence() {}
  static void copy_run(uint16_t* to, const uint16_t* from) {
    for (int64_t k = 0; k < 32; ++k) to[place_in_run(k)] = from == nullptr ? uint16_t{0} : from[k];
  }
  // Weights are decoded by the kernels for AVX-512 BF16, which tests with these tiles need.
  template <Bf16StripScale kType>
  struct Decoder {
    static void decode(const uint8_t* codes, const uint8_t* scales, bool has_second,
                       uint16_t* out) {
      kTileOrderKernelsAvx512.decode_scaled(codes, scales, kType, has_second ? 32 : 16, out);
    }
  };
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
  static void load(const void* from, int64_t stride) {
    PlainTile& to = tile(kTile);
    for (int64_t row = 0; row < to.rows; ++row) {
      std::memcpy(to.bytes[static_cast<size_t>(row)].data(),
                  static_cast<const uint8_t*>(from) + row * stride,
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
          const float x = flushed(bf16_to_float(element<uint16_t>(rows, m, k)));
          const float w = flushed(bf16_to_float(element<uint16_t>(weights, k / 2, 2 * n + k % 2)));
          float& sum = of_pairs[static_cast<size_t>(k % 2)];
          sum = flushed(std::fma(x, w, sum));
        }
        const float of_run = flushed(of_pairs[0] + of_pairs[1]);
        const float sum = flushed(flushed(element<float>(sums, m, n)) + of_run);
        std::memcpy(sums.bytes[static_cast<size_t>(m)].data() + n * 4, &sum, sizeof(sum));
      }
    }
  }
  static void add_scaled(float* total, const float* weight_factors, const float* row_factor,
                         const float* inner) {
    for (int64_t i = 0; i < 16; ++i) {
      const float weight_factor = weight_factors == nullptr ? 1.0F : weight_factors[i];
      const float factor = (row_factor == nullptr ? 1.0F : *row_factor) * weight_factor;
      total[i] = std::fma(factor, inner[i], total[i]);
    }
  }
};

inline constexpr size_t kTestLanes = 16;

// The place of a column of a weight row in a strip in tile order.
inline size_t place_of_weight(int64_t k, int64_t row) {
  const int64_t place = k / 32 * 32 + place_in_run(k % 32);
  return to_index((place / 2 * 16 + row) * 2 + place % 2);
}

// A chunk as the kernel takes it, and the number of what it multiplies.
struct ChunkShape {
  int64_t strips;
  int64_t cols;
  int64_t block_cols;            // 0: no factors.
  int64_t blocks_per_row_scale;  // 0: rows have no scales.
  int64_t rows;

  [[nodiscard]] int64_t blocks() const { return block_cols == 0 ? 1 : ceil_div(cols, block_cols); }
};

struct ChunkData {
  std::vector<uint16_t> values;                // [rows][cols]
  std::vector<std::vector<uint16_t>> weights;  // [strips]: [cols][16]
  std::vector<std::vector<float>> factors;     // [strips]: [blocks][16]; empty: 1
  std::vector<float> row_scales;               // [rows][blocks / blocks_per_row_scale]
  std::vector<float> sums;                     // [rows][strips][16]
};

// Adds the products with tiles in plain memory.
inline void multiply_plainly(const ChunkShape& shape, ChunkData& data) {
  const int64_t padded_cols = round_up(shape.cols, kTileRunCols);
  const int64_t groups = ceil_div(shape.rows, kTileGroupRows);
  TileChunk chunk{.strips = shape.strips,
                  .count = shape.rows,
                  .group_rows = ceil_div(shape.rows, groups),
                  .cols = padded_cols,
                  .block_cols = shape.block_cols,
                  .blocks_per_row_scale = std::max<int64_t>(1, shape.blocks_per_row_scale)};
  chunk.rows = groups * chunk.group_rows;
  std::vector<const uint16_t*> rows;
  std::vector<const float*> scales;
  const int64_t row_scales = ceil_div(shape.blocks(), chunk.blocks_per_row_scale);
  for (int64_t row = 0; row < shape.rows; ++row) {
    rows.push_back(&data.values[to_index(row * shape.cols)]);
    if (!data.row_scales.empty()) scales.push_back(&data.row_scales[to_index(row * row_scales)]);
  }
  if (!scales.empty()) chunk.row_scales = scales.data();
  // The kernels must not read these NaN.
  std::vector<uint16_t> packed(to_index(padded_cols * chunk.rows), 0x7FFF);
  amx_kernels::pack_rows<PlainTiles>(rows.data(), shape.rows, chunk.rows, shape.cols,
                                     packed.data());
  chunk.values = packed.data();
  std::vector<std::vector<uint16_t>> pairs;
  for (int64_t strip = 0; strip < shape.strips; ++strip) {
    const std::vector<uint16_t>& weights = data.weights[to_index(strip)];
    std::vector<uint16_t>& of_strip = pairs.emplace_back(to_index(padded_cols) * kTestLanes);
    for (size_t i = 0; i < weights.size(); ++i) {
      const auto index = static_cast<int64_t>(i);
      of_strip[place_of_weight(index / 16, index % 16)] = weights[i];
    }
  }
  for (size_t strip = 0; strip < pairs.size(); ++strip) {
    chunk.weights[strip] = pairs[strip].data();
    if (!data.factors.empty()) chunk.factors[strip] = data.factors[strip].data();
  }
  constexpr size_t kRowSums = kTileTaskStrips * kTestLanes;
  std::vector<float> sums(to_index(chunk.rows) * kRowSums);
  chunk.sums = sums.data();
  const size_t strip_sums = to_index(shape.strips) * kTestLanes;
  for (size_t i = 0; i < data.sums.size(); ++i) {
    sums[i / strip_sums * kRowSums + i % strip_sums] = data.sums[i];
  }
  amx_kernels::configure<PlainTiles>(chunk.group_rows);
  amx_kernels::multiply<PlainTiles>(chunk);
  PlainTiles::release();
  for (size_t i = 0; i < data.sums.size(); ++i) {
    data.sums[i] = sums[i / strip_sums * kRowSums + i % strip_sums];
  }
}

class Numbers {
 public:
  int64_t integer(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }
  std::vector<float> integers(int64_t count, int64_t low, int64_t high) {
    std::vector<float> result;
    for (int64_t i = 0; i < count; ++i) result.push_back(static_cast<float>(integer(low, high)));
    return result;
  }

 private:
  std::mt19937 random_{5};
};

inline std::vector<uint16_t> in_bf16(const std::vector<float>& numbers) {
  std::vector<uint16_t> result;
  for (const float number : numbers) result.push_back(float_to_bf16(number));
  return result;
}

}  // namespace narrowfloat
