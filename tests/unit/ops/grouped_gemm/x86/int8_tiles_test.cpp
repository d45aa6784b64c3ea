// The kernels for matrix tiles of bytes, with tiles in plain memory: few machines have real ones,
// on which grouped_gemm_test.cpp runs the kernels within their operation.
#include <array>
#include <cstring>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "base/float_ops.h"
#include "base/int_math.h"
#include "formats/minifloat.h"
#include "formats/ue8m0.h"
#include "ops/grouped_gemm/int8_gemm.h"
#include "ops/grouped_gemm/x86/int8_tiles_text.h"
#include "runtime/vector_level.h"
#include "support/gemm_case.h"
#include "support/index.h"

namespace narrowfloat {
namespace {

// Refuses to multiply without extents. Every thread has its tiles.
struct PlainInt8Tiles {
  using Floats = std::array<float, 16>;
  static inline thread_local int64_t rows = 0;

  static void configure(int64_t new_rows) {
    ASSERT_LE(new_rows, 16);
    rows = new_rows;
  }
  static void release() { rows = 0; }
  static void fence() {}
  template <int kIndex>
  static void multiply(const uint8_t* values, const uint8_t* weights, int32_t* sums) {
    ASSERT_GT(rows, 0) << "tiles have no extents";
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t n = 0; n < 16; ++n) {
        int32_t sum = 0;
        for (int64_t k = 0; k < 32; ++k) {
          sum += static_cast<int8_t>(values[m * 32 + k]) *
                 static_cast<int8_t>(weights[k / 4 * 64 + n * 4 + k % 4]);
        }
        sums[m * 16 + n] = sum;
      }
    }
  }
  static Floats load(const float* from) {
    Floats x;
    std::copy_n(from, 16, x.begin());
    return x;
  }
  static void store(float* to, const Floats& x) { std::copy_n(x.begin(), 16, to); }
  template <typename Operation>
  static Floats each(const Operation& operation) {
    Floats x;
    for (size_t i = 0; i < 16; ++i) x[i] = operation(i);
    return x;
  }
  static Floats add(const Floats& a, const Floats& b) {
    return each([&](size_t i) { return add_rn(a[i], b[i]); });
  }
  static Floats mul(const Floats& a, const Floats& b) {
    return each([&](size_t i) { return mul_rn(a[i], b[i]); });
  }
  static Floats broadcast(const float* from) {
    return each([&](size_t) { return *from; });
  }
  static Floats of_integers(const int32_t* from) {
    return each([&](size_t i) { return static_cast<float>(from[i]); });
  }
  static void decode(const uint8_t* codes, uint8_t* low, uint8_t* high) {
    for (int i = 0; i < 64; ++i) {
      low[i] = doubled(codes[i] & 0xFU);
      high[i] = doubled(codes[i] >> 4U);
    }
  }
  static uint8_t doubled(unsigned code) {
    return static_cast<uint8_t>(static_cast<int8_t>(2 * E2M1::decode(static_cast<uint8_t>(code))));
  }
  static Floats ue8m0(const uint8_t* codes) {
    return each([&](size_t i) { return UE8M0::decode(codes[i]); });
  }
};

constexpr int64_t kCols = 224;
constexpr int64_t kStart = 3;  // The totals before.

struct Int8Case {
  int64_t rows;
  std::vector<uint8_t> codes;      // [kCols / 8][2][64]
  std::vector<uint8_t> scales;     // [kCols / 32][2][16]
  std::vector<uint8_t> values;     // [kCols / 32][rows][32]
  std::vector<float> half_scales;  // [kCols / 32][rows]

  explicit Int8Case(int64_t count) : rows(count) {
    std::mt19937 random(7);
    const auto bytes = [&](int64_t size, uint32_t low, uint32_t high) {
      std::vector<uint8_t> result;
      for (int64_t i = 0; i < size; ++i) {
        result.push_back(static_cast<uint8_t>(low + random() % (high - low + 1)));
      }
      return result;
    };
    codes = bytes(kCols / 8 * 128, 0, 255);
    scales = bytes(kCols, 100, 126);
    values = bytes(kCols * rows, 0, 255);
    for (int64_t i = 0; i < kCols / 32 * rows; ++i) {
      half_scales.push_back(static_cast<float>(random() % 1000 + 1) / 777.0F);
    }
  }
  [[nodiscard]] Int8Strips strips() const {
    return {.layout = {.cols = kCols, .group_cols = 32},
            .count = 2,
            .codes = codes.data(),
            .scales = scales.data()};
  }
  [[nodiscard]] int32_t weight(int64_t strip, int64_t k, int64_t n) const {
    const uint8_t pair = codes[to_index((k / 8 * 2 + strip) * 64 + n * 4 + k % 4)];
    return static_cast<int8_t>(PlainInt8Tiles::doubled(k % 8 < 4 ? pair & 0xFU : pair >> 4U));
  }
  [[nodiscard]] float total(int64_t strip, int64_t row, int64_t n) const {
    float total = kStart;
    for (int64_t group = 0; group < kCols / 32; ++group) {
      int32_t inner = 0;
      for (int64_t k = 0; k < 32; ++k) {
        inner += static_cast<int8_t>(values[to_index((group * rows + row) * 32 + k)]) *
                 weight(strip, group * 32 + k, n);
      }
      const float scale = UE8M0::decode(scales[to_index((group * 2 + strip) * 16 + n)]);
      const float factor = mul_rn(half_scales[to_index(group * rows + row)], scale);
      total = add_rn(total, mul_rn(factor, static_cast<float>(inner)));
    }
    return total;
  }
};

TEST(Int8Tiles, AddEveryGroupInOrder) {
  const Int8TileKernels kernels = int8_tiles::int8_tile_kernels_of<PlainInt8Tiles>();
  for (const auto& [group_rows, groups] :
       std::vector<std::pair<int64_t, int64_t>>{{4, 1}, {8, 1}, {12, 3}, {16, 2}}) {
    const int64_t rows = group_rows * groups;
    const Int8Case what(rows);
    std::vector<float> sums(to_index(rows * kInt8TaskStrips * 16), kStart);
    std::vector<uint8_t> weights(to_index(kInt8ChunkCols * 16));
    std::vector<float> factors(to_index(kInt8ChunkCols / 32 * 16));
    kernels.configure(group_rows);
    for (int64_t strip = 0; strip < 2; ++strip) {
      // Three groups, then four.
      for (const auto& [first, cols] : {std::pair<int64_t, int64_t>{0, 96}, {96, kCols - 96}}) {
        kernels.decode(what.strips(), strip, first, cols, weights.data(), factors.data());
        kernels.multiply({.group_rows = group_rows,
                          .rows = rows,
                          .cols = cols,
                          .values = what.values.data() + first * rows,
                          .half_scales = what.half_scales.data() + first / 32 * rows,
                          .weights = weights.data(),
                          .factors = factors.data(),
                          .sums = sums.data() + strip * 16});
      }
    }
    kernels.release();
    for (int64_t i = 0; i < rows * kInt8TaskStrips * 16; ++i) {
      const int64_t strip = i / 16 % kInt8TaskStrips;
      const int64_t row = i / 16 / kInt8TaskStrips;
      const float expected = strip < 2 ? what.total(strip, row, i % 16) : kStart;
      ASSERT_EQ(sums[to_index(i)], expected)
          << "strip " << strip << ", row " << row << " of " << rows;
    }
  }
}

// Strips without a partner, more strips than a task has, and more columns than it copies at once;
// experts with few rows, whose products are those of vectors, and with many.
TEST(Int8Tiles, TheOperationHasTheBytesOfVectors) {
  if (!cpu_with({DeviceType::kCpu, 0}, VectorLevel::kAvx2).ok()) GTEST_SKIP() << "needs AVX2";
  const Int8TileKernels tiles = int8_tiles::int8_tile_kernels_of<PlainInt8Tiles>();
  for (const int64_t cols : {96, 1056}) {
    for (const bool gathers : {false, true}) {
      const testing::GemmCase gemm({.mode = MoeMode::kMxfp4Int8,
                                    .weight_rows = 304,
                                    .cols = cols,
                                    .expert_rows = {9, 0, 128, 3, 33, 61},
                                    .token_tile = 128,
                                    .gathers = gathers,
                                    .bias = DType::kF32});
      const auto run = [&](const Int8TileKernels* kernels) {
        const auto multiply = [&](const GroupedGemmProblem& problem, const GemmCall& call) {
          run_int8_gemm(problem, call, kInt8KernelsAvx2, kernels);
        };
        return gemm.run({.implementation = "cpu_avx2", .gemm = multiply});
      };
      EXPECT_EQ(run(&tiles), run(nullptr)) << cols << " columns";
    }
  }
}

}  // namespace
}  // namespace narrowfloat
