// Weight encodings of grouped_gemm on a GPU: every scale byte with every code to the bit, the ends
// of the exponent range, experts whose scales fit E4M3 beside experts whose scales do not, and rows
// whose results no tile and no other row changes.
#include <array>
#include <cmath>
#include <map>

#include <gtest/gtest.h>

#include "cuda/gpu_test.h"
#include "ops/grouped_gemm/grouped_gemm_problem.h"
#include "ops/grouped_gemm/packed/packed_weights.h"
#include "support/environment.h"
#include "support/expect_error.h"
#include "support/gemm_device_run.h"

namespace narrowfloat::testing {
namespace {

class WeightEncodingsCuda : public OwnCodeTestWith<MoeMode> {};

const PackedWeights& state_of(const GemmOnDevice& device) {
  return packed_weights(device.weights());
}

double element(const GemmCase& gemm, const std::vector<uint8_t>& output, int64_t row, int64_t col) {
  return output_element(DType::kF32, output, row * gemm.spec().weight_rows + col);
}

// NaN where the expected values are, otherwise their nearest fp32.
void expect_exact(const GemmCase& gemm, const std::vector<uint8_t>& output) {
  for (const GemmCase::Row& row : gemm.rows()) {
    for (int64_t col = 0; col < gemm.spec().weight_rows; ++col) {
      const auto expected = static_cast<float>(gemm.expected(row, col).value);
      const auto got = static_cast<float>(element(gemm, output, row.row, col));
      if (std::isnan(expected) && std::isnan(got)) continue;
      ASSERT_EQ(got, expected) << "row " << row.row << " col " << col;
    }
  }
}

GemmCaseSpec every_code(MoeMode mode, GemmData data, int64_t rows) {
  return {.mode = mode,
          .weight_rows = data == GemmData::kEveryWeight ? rows : 256,
          .cols = 256,
          .expert_rows = {data == GemmData::kEveryWeight ? 256 : rows},
          .token_tile = 64,
          .data = data};
}

// Few rows have the first encoding, many rows the other. 144 rows have all scales that MXFP4
// decodes with a single multiply.
TEST_P(WeightEncodingsCuda, DecodeEveryScaleAndCodeOfWeights) {
  for (const int64_t rows : {112, 144, 256}) {
    SCOPED_TRACE(rows);
    const GemmCase gemm(every_code(GetParam(), GemmData::kEveryWeight, rows));
    const GemmOnDevice device(gemm);
    const WeightEncoding first = encoding_of(GetParam());
    const int64_t fitting_rows = first == WeightEncoding::kMxfp4Near ? 144 : 112;
    const bool is_wide = rows > fitting_rows && may_not_fit(first);
    EXPECT_EQ(state_of(device).data.encoding,
              static_cast<int>(is_wide ? wide_encoding(first) : first));
    expect_exact(gemm, device.run());
  }
}

TEST_P(WeightEncodingsCuda, DecodeEveryScaleAndCodeOfInputs) {
  const GemmCase gemm(every_code(GetParam(), GemmData::kEveryInput, 256));
  expect_exact(gemm, GemmOnDevice(gemm).run());
}

// One of two experts has scales that the first encoding cannot follow. Both results are right, and
// those of the other experts are the same as without it.
TEST_P(WeightEncodingsCuda, AnExpertThatDoesNotFitChangesNoOther) {
  GemmCaseSpec spec{.mode = GetParam(),
                    .weight_rows = 272,
                    .cols = 640,
                    .expert_rows = {5, 70, 0, 9, 40},
                    .token_tile = 16,
                    .gathers = true,
                    .has_slot_weights = true,
                    .bias = DType::kF32,
                    .has_scale = true,
                    .wide_scales = false,
                    .seed = 21};
  const GemmCase fitting(spec);
  const GemmOnDevice fitting_device(fitting);
  EXPECT_EQ(state_of(fitting_device).data.tables.expert_encodings, nullptr);
  const std::vector<uint8_t> fitting_output = fitting_device.run();
  spec.wide_experts = {1, 4};
  const GemmCase mixed(spec);
  const GemmOnDevice device(mixed);
  const std::vector<uint8_t> output = device.run();
  EXPECT_EQ(device.replay(), output);
  const bool has_both_encodings = may_not_fit(encoding_of(GetParam()));
  EXPECT_EQ(state_of(device).data.tables.expert_encodings != nullptr, has_both_encodings);
  EXPECT_EQ(state_of(device).data.encoding, static_cast<int>(encoding_of(GetParam())));
  const GemmTolerance tolerance = gemm_tolerance(spec);
  for (const GemmCase::Row& row : mixed.rows()) {
    const bool is_wide = row.expert == 1 || row.expert == 4;
    for (int64_t col = 0; col < spec.weight_rows; ++col) {
      const double got = element(mixed, output, row.row, col);
      const auto [value, magnitude] = mixed.expected(row, col);
      ASSERT_NEAR(got, value, tolerance.of_terms * magnitude)
          << "row " << row.row << " col " << col;
      if (!is_wide) {
        ASSERT_EQ(got, element(mixed, fitting_output, row.row, col)) << "row " << row.row;
      }
    }
  }
}

// The bits of a row's results are those of any token tile, and of any other rows of the call.
TEST_P(WeightEncodingsCuda, ARowIsTheSameInEveryTile) {
  GemmCaseSpec spec{.mode = GetParam(),
                    .weight_rows = 272,
                    .cols = 640,
                    .expert_rows = {131},
                    .gathers = true,  // Rows of `a` that do not depend on the tile.
                    .wide_scales = false,
                    .seed = 22};
  std::map<int64_t, std::vector<double>> results;  // Indexed by position in the expert.
  for (const int32_t tile : {128, 1, 8, 16, 32, 64, 256}) {
    // Tiles of 16 and 32 rows multiply half of their columns where their rows fit.
    for (const int64_t rows : {131, 8, 9, 16, 17}) {
      SCOPED_TRACE(tile);
      spec.token_tile = tile;
      const GemmCase gemm(spec);
      GemmOnDevice device(gemm);
      // Fewer rows: the others end before they begin.
      std::vector<int32_t> ends(static_cast<size_t>(gemm.args().permutation.tile_row_end.shape[0]));
      for (size_t i = 0; i < ends.size(); ++i) {
        ends[i] = static_cast<int32_t>(
            std::min<int64_t>(rows, static_cast<int64_t>(i + 1) * spec.token_tile));
      }
      device.args.permutation.tile_row_end = device.copy(
          TensorView::contiguous(ends.data(), DType::kI32, {static_cast<int64_t>(ends.size())}));
      const std::vector<uint8_t> output = device.run();
      for (int64_t row = 0; row < rows; ++row) {
        std::vector<double> values;
        for (int64_t col = 0; col < spec.weight_rows; ++col) {
          values.push_back(element(gemm, output, row, col));
        }
        const auto [known, is_new] = results.try_emplace(row, values);
        ASSERT_EQ(known->second, values) << "row " << row << " of " << rows;
      }
    }
  }
}

constexpr std::array kEveryMode{
    MoeMode::kBf16,          MoeMode::kFp8Tensor,     MoeMode::kFp8Block,
    MoeMode::kMxfp8,         MoeMode::kMxfp4Mxfp8,    MoeMode::kMxfp4Bf16,
    MoeMode::kMxfp4Fp8,      MoeMode::kNvfp4,         MoeMode::kNvfp4PerToken,
    MoeMode::kNvfp4Bf16,     MoeMode::kNvfp4Fp8Exact, MoeMode::kNvfp4Fp8Rounded,
    MoeMode::kMxfp4Fp8Token, MoeMode::kNvfp4Fp8Token};
INSTANTIATE_TEST_SUITE_P(All, WeightEncodingsCuda, ::testing::ValuesIn(kEveryMode),
                         [](const auto& test) { return std::string(name(test.param)); });

class WeightScalesCuda : public OwnCodeTest {};

// The sums are 3 * 2^14 + 1, times a power of two or 3: with 13 fraction bits the tensor core's own
// sums do not have them.
GemmCase needs_promotion(MoeMode mode) {
  return GemmCase({.mode = mode,
                   .weight_rows = 128,
                   .cols = 512,
                   .expert_rows = {64},
                   .token_tile = 64,
                   .data = GemmData::kNeedsPromotion});
}

TEST_F(WeightScalesCuda, SumsOfFp8KeepWhatOneTensorCoreSumLoses) {
  for (const MoeMode mode :
       {MoeMode::kFp8Tensor, MoeMode::kFp8Block, MoeMode::kMxfp4Fp8, MoeMode::kNvfp4Fp8Rounded}) {
    SCOPED_TRACE(name(mode));
    const GemmCase gemm = needs_promotion(mode);
    expect_exact(gemm, GemmOnDevice(gemm).run());
  }
}

// With a scale per row the tensor cores sum all columns (moe spec 11.4).
TEST_F(WeightScalesCuda, SumsOfFp8RowsWithOneScaleKeep13FractionBits) {
  for (const MoeMode mode : {MoeMode::kMxfp4Fp8Token, MoeMode::kNvfp4Fp8Token}) {
    SCOPED_TRACE(name(mode));
    const GemmCase gemm = needs_promotion(mode);
    const std::vector<uint8_t> output = GemmOnDevice(gemm).run();
    for (const GemmCase::Row& row : gemm.rows()) {
      for (int64_t col = 0; col < gemm.spec().weight_rows; ++col) {
        const double expected = gemm.expected(row, col).value;
        ASSERT_NEAR(element(gemm, output, row.row, col), expected, 0x1p-13 * expected)
            << "row " << row.row << " col " << col;
      }
    }
  }
}

// MXFP4 scales of two blocks of a row, the others between 2^-115 and 2^-106.
struct TwoScales {
  uint8_t first;
  uint8_t last;
  WeightEncoding encoding;
};

TEST_F(WeightScalesCuda, OneMultiplicationHasScalesOfUpToTwoWithin126Powers) {
  constexpr std::array kEdges{TwoScales{118, 127, WeightEncoding::kMxfp4Near},
                              TwoScales{2, 128, WeightEncoding::kMxfp4Near},
                              TwoScales{0, 126, WeightEncoding::kMxfp4Near},
                              TwoScales{127, 1, WeightEncoding::kMxfp4Near},
                              TwoScales{0, 127, WeightEncoding::kMxfp4},
                              TwoScales{128, 1, WeightEncoding::kMxfp4},
                              TwoScales{118, 129, WeightEncoding::kMxfp4},
                              TwoScales{250, 12, WeightEncoding::kMxfp4}};
  for (const TwoScales& edge : kEdges) {
    SCOPED_TRACE(::testing::Message() << int{edge.first} << " and " << int{edge.last});
    GemmCase gemm(every_code(MoeMode::kMxfp4Bf16, GemmData::kEveryWeight, 112));
    gemm.set_weight_scale(5, 0, edge.first);
    gemm.set_weight_scale(5, 7, edge.last);
    const GemmOnDevice device(gemm);
    EXPECT_EQ(state_of(device).data.encoding, static_cast<int>(edge.encoding));
    expect_exact(gemm, device.run());
  }
}

TEST_F(WeightScalesCuda, BlocksOfZerosHaveAnyScaleButNan) {
  GemmCase gemm(every_code(MoeMode::kMxfp4Bf16, GemmData::kEveryWeight, 112));
  for (const uint8_t scale : {uint8_t{0}, uint8_t{254}}) {
    gemm.clear_weights(5, 3);
    gemm.set_weight_scale(5, 3, scale);
    const GemmOnDevice device(gemm);
    EXPECT_EQ(state_of(device).data.encoding, static_cast<int>(WeightEncoding::kMxfp4Near));
    EXPECT_EQ(state_of(device).data.tables.row_powers, nullptr);
    expect_exact(gemm, device.run());
  }
  GemmCase two({.mode = MoeMode::kMxfp4Bf16, .expert_rows = {9, 4}, .wide_scales = false});
  ASSERT_TRUE(two.plant_nan_scale_of_zeros(3));
  const GemmOnDevice device(two);
  EXPECT_EQ(state_of(device).data.encoding, static_cast<int>(WeightEncoding::kMxfp4Near));
  EXPECT_NE(state_of(device).data.tables.expert_encodings, nullptr);
}

// Findings of an expert's first encoding are dropped where it gets the other one.
TEST_F(WeightScalesCuda, RowsThatOnlyTheFirstEncodingMovesLeaveNoTable) {
  GemmCase gemm(every_code(MoeMode::kMxfp4Bf16, GemmData::kEveryWeight, 112));
  gemm.set_weight_scale(5, 0, 129);
  const GemmOnDevice device(gemm);
  EXPECT_EQ(state_of(device).data.encoding, static_cast<int>(WeightEncoding::kMxfp4));
  EXPECT_EQ(state_of(device).data.tables.row_powers, nullptr);
}

// Down to the least denormals: both encodings of an expert give the same bits.
TEST_F(WeightScalesCuda, OneMultiplicationOrTwoGiveTheSameBits) {
  GemmCase gemm({.mode = MoeMode::kMxfp4Bf16,
                 .weight_rows = 144,
                 .cols = 640,
                 .expert_rows = {70},
                 .token_tile = 64,
                 .seed = 23});
  for (size_t i = 1; i < gemm.input_codes.size(); i += 2) {
    gemm.input_codes[i] &= 0x83;  // Magnitudes below 2^-119.
  }
  const GemmOnDevice near(gemm);
  const std::vector<uint8_t> expected = near.run();
  EXPECT_EQ(state_of(near).data.encoding, static_cast<int>(WeightEncoding::kMxfp4Near));
  gemm.set_weight_scale(7, 2, 129);
  const GemmOnDevice wide(gemm);
  const std::vector<uint8_t> output = wide.run();
  EXPECT_EQ(state_of(wide).data.encoding, static_cast<int>(WeightEncoding::kMxfp4));
  for (const GemmCase::Row& row : gemm.rows()) {
    for (int64_t col = 0; col < gemm.spec().weight_rows; ++col) {
      if (col == 7) continue;
      ASSERT_EQ(element(gemm, output, row.row, col), element(gemm, expected, row.row, col))
          << "row " << row.row << " col " << col;
    }
  }
}

// A row that has both ends of the range has no bf16 encoding.
TEST_F(WeightScalesCuda, FurtherApartThanBf16ReachesAreRefused) {
  GemmCase gemm({.mode = MoeMode::kMxfp8, .expert_rows = {3, 4}});
  gemm.set_weight_scale(7, 0, 1);
  gemm.set_weight_scale(7, 2, 250);
  expect_error(ErrorKind::kUnsupported, {"weights.scales", "expert 0"},
               [&] { static_cast<void>(GemmOnDevice(gemm)); });
}

// The portable kernel, on every GPU.
class WeightEncodingsPortable : public GpuTestWith<MoeMode> {
 protected:
  const ForcedImplementation forced_{"grouped_gemm", kGroupedGemmSm80.name};
};

// MXFP4 decodes the scales of the first 128 rows with one multiplication.
TEST_P(WeightEncodingsPortable, DecodeEveryScaleAndCodeOfWeights) {
  for (const int64_t rows : {128, 256}) {
    SCOPED_TRACE(rows);
    const GemmCase gemm(every_code(GetParam(), GemmData::kEveryWeight, rows));
    expect_exact(gemm, GemmOnDevice(gemm).run());
  }
}

// Tiles of 128 are full, have up to half of their rows, or up to 32. An expert with large scales
// changes no other expert, and only that column of its own.
TEST_P(WeightEncodingsPortable, ARowIsTheSameInEveryTile) {
  const bool is_mxfp4 = moe_mode_info(GetParam()).weights == WeightFormat::kMxfp4;
  std::vector<double> expected;
  for (const int32_t tile : {128, 64, 32, 8}) {
    for (const bool has_large_scale : {false, true}) {
      if (has_large_scale && !is_mxfp4) continue;
      SCOPED_TRACE(::testing::Message() << tile << (has_large_scale ? ", a large scale" : ""));
      GemmCase gemm({.mode = GetParam(),
                     .weight_rows = 144,
                     .cols = 256,
                     .expert_rows = {520, 0, 40, 70},
                     .token_tile = tile,
                     .gathers = true,
                     .wide_scales = false,
                     .seed = 24});
      if (has_large_scale) gemm.set_weight_scale(7, 2, 131);
      const std::vector<uint8_t> output = GemmOnDevice(gemm).run();
      std::vector<double> values;
      for (const GemmCase::Row& row : gemm.rows()) {
        for (int64_t col = 0; col < gemm.spec().weight_rows; ++col) {
          const bool counts = col != 7 || row.expert != 0;
          values.push_back(counts ? element(gemm, output, row.row, col) : 0.0);
        }
      }
      if (expected.empty()) expected = values;
      ASSERT_EQ(values, expected);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, WeightEncodingsPortable, ::testing::ValuesIn(kEveryMode),
                         [](const auto& test) { return std::string(name(test.param)); });

}  // namespace
}  // namespace narrowfloat::testing
