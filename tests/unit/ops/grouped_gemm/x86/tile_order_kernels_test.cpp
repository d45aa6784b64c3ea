// The kernels for few rows beside tiles, against tiles in plain memory.
#include "base/float_ops.h"
#include "formats/minifloat.h"
#include "formats/ue8m0.h"
#include "runtime/vector_level.h"
#include "unit/ops/grouped_gemm/x86/plain_tiles.h"

namespace narrowfloat {
namespace {

// Strips of E2M1 codes with block scales, as they are packed.
struct CodedStrips {
  Bf16StripScale type;
  int64_t block_cols;
  int64_t cols;
  int least_weight;  // Exponents of the products of codes and scales.
  int most_weight;
  std::vector<std::vector<uint8_t>> codes;   // [strips]: [cols][8]
  std::vector<std::vector<uint8_t>> scales;  // [strips]: [blocks][16]

  [[nodiscard]] float value(size_t strip, int64_t k, int64_t row) const {
    const uint8_t pair = codes[strip][to_index(k * 8 + row / 2)];
    return E2M1::decode(static_cast<uint8_t>(row % 2 == 0 ? pair & 0xFU : pair >> 4U));
  }
  [[nodiscard]] float scale(size_t strip, int64_t k, int64_t row) const {
    const uint8_t code = scales[strip][to_index(k / block_cols * 16 + row)];
    return type == Bf16StripScale::kE4M3 ? E4M3::decode(code) : UE8M0::decode(code);
  }
  // A weight times its scale. Zeros lose their sign where scales are powers of two.
  [[nodiscard]] float product(size_t strip, int64_t k, int64_t row) const {
    const float code = value(strip, k, row);
    const bool loses_sign = code == 0 && type == Bf16StripScale::kUE8M0;
    return (loses_sign ? 0.0F : code) * scale(strip, k, row);
  }
};

// UE8M0 scales have codes of [low, high], and one is NaN.
CodedStrips coded_strips(Bf16StripScale type, int64_t strips, int64_t cols, Numbers& numbers,
                         int low = 2, int high = 252) {
  const bool is_e4m3 = type == Bf16StripScale::kE4M3;
  CodedStrips result{.type = type,
                     .block_cols = is_e4m3 ? 16 : 32,
                     .cols = cols,
                     .least_weight = is_e4m3 ? -10 : low - 127 - 1,
                     .most_weight = is_e4m3 ? 11 : high - 127 + 2,
                     .codes = {},
                     .scales = {}};
  for (int64_t strip = 0; strip < strips; ++strip) {
    std::vector<uint8_t>& codes = result.codes.emplace_back();
    for (int64_t i = 0; i < cols * 8; ++i) {
      codes.push_back(static_cast<uint8_t>(numbers.integer(0, 255)));
    }
    std::vector<uint8_t>& scales = result.scales.emplace_back();
    for (int64_t i = 0; i < cols / result.block_cols * 16; ++i) {
      scales.push_back(
          static_cast<uint8_t>(is_e4m3 ? numbers.integer(0, 255) : numbers.integer(low, high)));
    }
  }
  if (!is_e4m3) result.scales[0][3] = 255;
  return result;
}

bool has_avx512_bf16() { return cpu_with({DeviceType::kCpu, 0}, VectorLevel::kAvx512Bf16).ok(); }

// The same number, or both NaN.
bool is_same(float a, float b) {
  return float_bits(a) == float_bits(b) || (std::isnan(a) && std::isnan(b));
}

TEST(TileOrderKernels, DecodeScaledWeights) {
  if (!has_avx512_bf16()) GTEST_SKIP() << "needs AVX-512 BF16";
  Numbers numbers;
  for (const Bf16StripScale type : {Bf16StripScale::kE4M3, Bf16StripScale::kUE8M0}) {
    // The last run of NVFP4 weights may be half of one.
    const int64_t cols = type == Bf16StripScale::kE4M3 ? 1008 : 992;
    const CodedStrips strips = coded_strips(type, 1, cols, numbers);
    std::vector<uint16_t> decoded(1024 * kTestLanes, 0x7FFF);
    kTileOrderKernelsAvx512.decode_scaled(strips.codes[0].data(), strips.scales[0].data(), type,
                                          cols, decoded.data());
    for (int64_t k = 0; k < round_up(cols, 32); ++k) {
      for (int64_t row = 0; row < 16; ++row) {
        const float expected = k < cols ? strips.product(0, k, row) : 0.0F;
        const float got = bf16_to_float(decoded[place_of_weight(k, row)]);
        ASSERT_TRUE(is_same(got, expected)) << k << " " << row << ": " << got << " " << expected;
      }
    }
  }
}

TEST(TileOrderKernels, OrderDecodedWeights) {
  if (!has_avx512_bf16()) GTEST_SKIP() << "needs AVX-512 BF16";
  Numbers numbers;
  const std::vector<uint16_t> ascending = in_bf16(numbers.integers(96 * 16, -256, 256));
  std::vector<uint16_t> ordered = ascending;
  kTileOrderKernelsAvx512.order(ordered.data(), 96);
  for (int64_t k = 0; k < 96; ++k) {
    for (int64_t row = 0; row < 16; ++row) {
      ASSERT_EQ(ordered[place_of_weight(k, row)],
                ascending[to_index((k / 2 * 16 + row) * 2 + k % 2)])
          << k << " " << row;
    }
  }
}

// Products and sums at every magnitude, those that count as zero included.
std::vector<uint16_t> values_of_all_sizes(int64_t count, Numbers& numbers) {
  std::vector<uint16_t> values;
  const int64_t base = numbers.integer(1, 200);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t exponent = std::max<int64_t>(0, base + numbers.integer(-6, 6));
    values.push_back(static_cast<uint16_t>(numbers.integer(0, 1) << 15 | exponent << 7 |
                                           numbers.integer(0, 127)));
  }
  return values;
}

// The weights of few rows, and the sums that have factors.
struct FewRowsCase {
  Bf16StripScale type;
  bool is_scaled;
  int64_t sum_cols;
  int64_t blocks_per_row_scale;  // 0: rows have no scales.
};

void expect_bits_of_tiles(const FewRowsCase& what, int64_t rows, int64_t count, Numbers& numbers) {
  const int64_t cols = what.type == Bf16StripScale::kE4M3 ? 208 : 288;
  // In half of the cases no product is as small or as large as to keep sums of runs from being
  // multiplied by their scales.
  const int low = static_cast<int>(numbers.integer(2, 126));
  const bool has_all = numbers.integer(0, 1) == 0;
  const CodedStrips strips =
      coded_strips(what.type, count, cols, numbers, has_all ? 2 : low, has_all ? 252 : low + 20);
  const ChunkShape shape{1, cols, what.sum_cols, what.blocks_per_row_scale, rows};
  ChunkData data;
  data.values = values_of_all_sizes(rows * cols, numbers);
  if (what.blocks_per_row_scale != 0) data.row_scales = numbers.integers(rows * 16, 1, 9);
  std::vector<float> sums(to_index(rows * count) * kTestLanes);
  FewBf16Rows task{.cols = cols,
                   .type = what.type,
                   .block_cols = strips.block_cols,
                   .blocks_per_row_scale = std::max<int64_t>(1, what.blocks_per_row_scale),
                   .strips = count,
                   .rows = rows,
                   .codes = {},
                   .scales = {},
                   .values = {},
                   .row_scales = {},
                   .sums = {}};
  const int64_t row_scales = ceil_div(shape.blocks(), task.blocks_per_row_scale);
  for (int64_t row = 0; row < rows; ++row) {
    task.values[row] = &data.values[to_index(row * cols)];
    task.sums[row] = &sums[to_index(row * count) * kTestLanes];
    if (!data.row_scales.empty()) {
      task.row_scales[row] = &data.row_scales[to_index(row * row_scales)];
    }
  }
  for (int64_t strip = 0; strip < count; ++strip) {
    task.codes[strip] = strips.codes[to_index(strip)].data();
    task.scales[strip] = strips.scales[to_index(strip)].data();
  }
  kTileOrderKernelsAvx512.multiply_few_rows({.rows = task,
                                             .is_scaled = what.is_scaled,
                                             .least_weight = strips.least_weight,
                                             .most_weight = strips.most_weight,
                                             .sum_cols = what.sum_cols});
  for (int64_t strip = 0; strip < count; ++strip) {
    std::vector<float> weights;
    std::vector<float> factors;
    for (int64_t i = 0; i < cols * 16; ++i) {
      const float scale = strips.scale(to_index(strip), i / 16, i % 16);
      const float value = strips.value(to_index(strip), i / 16, i % 16);
      weights.push_back(what.is_scaled ? strips.product(to_index(strip), i / 16, i % 16) : value);
      if (i / 16 % strips.block_cols == 0) factors.push_back(scale);
    }
    data.weights = {in_bf16(weights)};
    if (!what.is_scaled) data.factors = {factors};
    data.sums.assign(to_index(rows) * kTestLanes, 0.0F);
    multiply_plainly(shape, data);
    for (int64_t i = 0; i < rows * 16; ++i) {
      const float got = sums[to_index((i / 16 * count + strip) * 16 + i % 16)];
      ASSERT_TRUE(is_same(got, data.sums[to_index(i)]))
          << rows << " rows, " << count << " strips, sums of " << what.sum_cols << ": " << got
          << " " << data.sums[to_index(i)];
    }
  }
}

TEST(TileOrderKernels, FewRowsHaveTheBitsOfTiles) {
  if (!has_avx512_bf16()) GTEST_SKIP() << "needs AVX-512 BF16";
  Numbers numbers;
  for (const FewRowsCase& what : {FewRowsCase{Bf16StripScale::kE4M3, true, 0, 0},
                                  FewRowsCase{Bf16StripScale::kE4M3, true, 128, 1},
                                  FewRowsCase{Bf16StripScale::kUE8M0, true, 0, 0},
                                  FewRowsCase{Bf16StripScale::kUE8M0, true, 128, 1},
                                  FewRowsCase{Bf16StripScale::kUE8M0, false, 32, 0},
                                  FewRowsCase{Bf16StripScale::kUE8M0, false, 32, 1},
                                  FewRowsCase{Bf16StripScale::kUE8M0, false, 32, 4}}) {
    for (int64_t rows = 1; rows <= kFewBf16Rows; ++rows) {
      for (int64_t strips = 1; strips <= kFewBf16Strips; ++strips) {
        for (int repetition = 0; repetition < 8; ++repetition) {
          expect_bits_of_tiles(what, rows, strips, numbers);
        }
      }
    }
  }
}

// Chunks of columns, pairs of strips and one alone, groups of rows.
void expect_bits_of_chunks(Bf16StripScale type, int64_t rows, int64_t count, Numbers& numbers) {
  const int64_t cols = type == Bf16StripScale::kE4M3 ? 656 : 640;
  const CodedStrips strips = coded_strips(type, count, cols, numbers);
  std::vector<uint8_t> codes;
  std::vector<uint8_t> scales;
  for (size_t strip = 0; strip < to_index(count); ++strip) {
    codes.insert(codes.end(), strips.codes[strip].begin(), strips.codes[strip].end());
    scales.insert(scales.end(), strips.scales[strip].begin(), strips.scales[strip].end());
  }
  const ChunkShape shape{1, cols, 0, 0, rows};
  ChunkData data;
  data.values = values_of_all_sizes(rows * cols, numbers);
  const int64_t groups = ceil_div(rows, kTileGroupRows);
  const int64_t group_rows = ceil_div(rows, groups);
  const int64_t all_rows = groups * group_rows;
  std::vector<const uint16_t*> from;
  for (int64_t row = 0; row < rows; ++row) from.push_back(&data.values[to_index(row * cols)]);
  std::vector<uint16_t> packed(to_index(round_up(cols, kTileRunCols) * all_rows), 0x7FFF);
  amx_kernels::pack_rows<PlainTiles>(from.data(), rows, all_rows, cols, packed.data());
  constexpr float kFirstSum = 3;
  std::vector<float> sums(to_index(count * all_rows) * kTestLanes, kFirstSum);
  amx_kernels::configure<PlainTiles>(group_rows);
  amx_kernels::multiply_scaled<PlainTiles>({.strips = count,
                                            .group_rows = group_rows,
                                            .rows = all_rows,
                                            .cols = cols,
                                            .type = type,
                                            .codes = codes.data(),
                                            .scales = scales.data(),
                                            .strip_bytes = cols * 8,
                                            .strip_scale_bytes = cols / strips.block_cols * 16,
                                            .values = packed.data(),
                                            .sums = sums.data()});
  PlainTiles::release();
  for (int64_t strip = 0; strip < count; ++strip) {
    std::vector<float> weights;
    for (int64_t i = 0; i < cols * 16; ++i) {
      weights.push_back(strips.product(to_index(strip), i / 16, i % 16));
    }
    data.weights = {in_bf16(weights)};
    data.sums.assign(to_index(rows) * kTestLanes, kFirstSum);
    multiply_plainly(shape, data);
    for (int64_t i = 0; i < rows * 16; ++i) {
      const float got = sums[to_index((strip * all_rows + i / 16) * 16 + i % 16)];
      ASSERT_TRUE(is_same(got, data.sums[to_index(i)]))
          << rows << " rows, strip " << strip << " of " << count << ": " << got << " "
          << data.sums[to_index(i)];
    }
  }
}

TEST(TileOrderKernels, ChunksOfScaledWeightsHaveTheBitsOfTiles) {
  if (!has_avx512_bf16()) GTEST_SKIP() << "needs AVX-512 BF16";
  Numbers numbers;
  for (const Bf16StripScale type : {Bf16StripScale::kE4M3, Bf16StripScale::kUE8M0}) {
    for (const int64_t rows : {1, 5, 16, 20, 33, 100}) {
      for (const int64_t strips : {1, 2, 5}) expect_bits_of_chunks(type, rows, strips, numbers);
    }
  }
}

// The total, and the sums of the last run, are negative numbers that count as zero when weights of
// negative zero follow, so that these zeros' signs are the total's.
TEST(TileOrderKernels, ZerosOfFewRowsHaveTheSignsOfTiles) {
  if (!has_avx512_bf16()) GTEST_SKIP() << "needs AVX-512 BF16";
  constexpr int64_t kRowCols = 96;
  std::vector<float> row(kRowCols, 0.0F);
  row[0] = -0x1.8p-126F;
  row[32] = 0x1p-126F;
  for (size_t k = 64; k < kRowCols; ++k) row[k] = 1;
  row[65] = row[81] = -0x1p-126F;
  std::vector<uint8_t> codes(kRowCols * 8, 0x88);
  const std::array<std::pair<size_t, uint8_t>, 4> of_columns{
      {{0, 0x22}, {32, 0x22}, {65, 0x11}, {81, 0x11}}};
  for (const auto& [k, code] : of_columns) std::fill_n(&codes[k * 8], 8, code);
  const std::vector<uint8_t> scales(kRowCols / 32 * 16, 127);
  const std::vector<uint16_t> values = in_bf16(row);

  std::vector<float> of_vectors(kTestLanes, 1);
  FewBf16Rows task{.cols = kRowCols,
                   .type = Bf16StripScale::kUE8M0,
                   .block_cols = 32,
                   .blocks_per_row_scale = 1,
                   .strips = 1,
                   .rows = 1,
                   .codes = {codes.data()},
                   .scales = {scales.data()},
                   .values = {values.data()},
                   .row_scales = {},
                   .sums = {of_vectors.data()}};
  kTileOrderKernelsAvx512.multiply_few_rows(
      {.rows = task, .is_scaled = true, .least_weight = -1, .most_weight = 2, .sum_cols = 0});
  std::vector<float> of_tiles(kTestLanes, 0.0F);
  std::vector<uint16_t> packed(kRowCols);
  const uint16_t* from = values.data();
  amx_kernels::pack_rows<PlainTiles>(&from, 1, 1, kRowCols, packed.data());
  amx_kernels::configure<PlainTiles>(1);
  amx_kernels::multiply_scaled<PlainTiles>({.strips = 1,
                                            .group_rows = 1,
                                            .rows = 1,
                                            .cols = kRowCols,
                                            .type = Bf16StripScale::kUE8M0,
                                            .codes = codes.data(),
                                            .scales = scales.data(),
                                            .values = packed.data(),
                                            .sums = of_tiles.data()});
  PlainTiles::release();
  for (size_t lane = 0; lane < kTestLanes; ++lane) {
    EXPECT_EQ(float_bits(of_vectors[lane]), float_bits(of_tiles[lane])) << lane;
  }
}

}  // namespace
}  // namespace narrowfloat
