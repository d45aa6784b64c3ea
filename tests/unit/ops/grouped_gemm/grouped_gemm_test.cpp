// Results of grouped_gemm against int64 arithmetic and a double-precision model on codes that the
// test decodes itself, and the laws that hold between calls.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "formats/float16.h"
#include "ops/grouped_gemm/grouped_gemm_problem.h"
#include "ops/grouped_gemm/product_range.h"
#include "support/environment.h"
#include "support/expect_error.h"
#include "support/gemm_case.h"
#include "support/moe_modes.h"

namespace narrowfloat::testing {
namespace {

constexpr std::array kImplementations{"cpu_baseline", "cpu_reference"};

// A K that the mode takes and that is no multiple of its larger blocks.
int64_t odd_cols(MoeMode mode) {
  const int64_t multiple = moe_mode_info(mode).multiple;
  return multiple == 16 ? 144 + 128 : multiple == 32 ? 160 + 128 : 384;
}

// Every implementation of the mode that this processor has.
std::vector<std::string> implementations(MoeMode mode = MoeMode::kBf16) {
  std::vector<std::string> names;
  for (const GroupedGemmImpl& impl : grouped_gemm_impls()) {
    if (impl.supports({.mode = mode}).ok()) names.emplace_back(impl.name);
  }
  return names;
}

class GroupedGemm : public ::testing::TestWithParam<MoeMode> {};

TEST_P(GroupedGemm, EqualsIntegerArithmeticWhereThatIsExact) {
  for (const int64_t cols : {moe_mode_info(GetParam()).multiple, odd_cols(GetParam())}) {
    const GemmCase gemm({.mode = GetParam(),
                         .weight_rows = 48,
                         .cols = cols,
                         .expert_rows = {1, 0, 9, 3},
                         .has_slot_weights = true,
                         .bias = DType::kF32,
                         .gate_order = GateOrder::kUpGate,
                         .has_scale = true,
                         .data = GemmData::kIntegers,
                         .seed = 7});
    const auto check = [&](const GemmRun& run) {
      const auto output = gemm.run(run);
      for (const auto& row : gemm.rows()) {
        for (int64_t n = 0; n < 48; ++n) {
          // Integers far below 2^53: the model's doubles are exact.
          const auto expected = static_cast<int64_t>(gemm.expected(row, n).value);
          ASSERT_LT(std::abs(expected), 1 << 24);
          ASSERT_EQ(output_element(DType::kF32, output, row.row * 48 + n),
                    static_cast<double>(expected))
              << run.implementation << " row " << row.row << " column " << n;
        }
      }
    };
    for (const auto* implementation : kImplementations) check({.implementation = implementation});
    for (const std::string& implementation : implementations(GetParam())) {
      check({.implementation = implementation, .accumulation = Accumulation::kFast});
    }
  }
}

// The distance allowed to the model, in terms' magnitudes.
double tolerance(Accumulation accumulation, DType output, int64_t cols) {
  const auto terms = static_cast<double>(cols + 8);
  if (output == DType::kBF16) return 0x1.01p-8;
  if (accumulation != Accumulation::kFp64) return terms * 0x1p-24;
  return output == DType::kF32 ? 0x1.01p-24 : terms * 0x1p-52;
}

TEST_P(GroupedGemm, IsCloseToADoublePrecisionModelOfTheCodes) {
  const GemmCase gemm({.mode = GetParam(),
                       .weight_rows = 144,
                       .cols = odd_cols(GetParam()),
                       .expert_rows = {2, 5, 0, 17},
                       .token_tile = 4,
                       .gathers = true,
                       .has_slot_weights = true,
                       .bias = DType::kBF16,
                       .gate_order = GateOrder::kInterleaved,
                       .has_scale = true,
                       .seed = 11});
  const auto check = [&](const GemmRun& run) {
    const auto output = gemm.run(run);
    const double allowed = tolerance(run.accumulation, run.output, gemm.spec().cols);
    for (const auto& row : gemm.rows()) {
      for (int64_t n = 0; n < 144; ++n) {
        const auto expected = gemm.expected(row, n);
        ASSERT_NEAR(output_element(run.output, output, row.row * 144 + n), expected.value,
                    allowed * expected.magnitude)
            << run.implementation << " " << row.row << " " << n << " " << name(run.output);
      }
    }
  };
  for (const Accumulation accumulation : {Accumulation::kFp32, Accumulation::kFp64}) {
    for (const DType output_type : {DType::kF32, DType::kBF16, DType::kF64}) {
      if (output_type == DType::kF64 && accumulation == Accumulation::kFp32) continue;
      check({.accumulation = accumulation, .output = output_type});
    }
  }
  for (const std::string& implementation : implementations(GetParam())) {
    check({.implementation = implementation, .accumulation = Accumulation::kFast});
  }
}

// As products are exact, a fused operation rounds as a multiplication and an addition do. Levels
// with bf16 dot products have other sums.
TEST_P(GroupedGemm, FusedOperationsHaveTheBitsOfTheReference) {
  const GemmCase gemm({.mode = GetParam(),
                       .weight_rows = 48,
                       .cols = odd_cols(GetParam()),
                       .expert_rows = {3, 0, 29},
                       .token_tile = 32,
                       .wide_scales = false,
                       .seed = 47});
  const auto expected = gemm.run({.implementation = "cpu_reference"});
  for (const std::string& implementation : implementations(GetParam())) {
    EXPECT_EQ(gemm.run({.implementation = implementation}), expected) << implementation;
    if (implementation.ends_with("bf16")) continue;
    EXPECT_EQ(gemm.run({.implementation = implementation, .accumulation = Accumulation::kFast}),
              expected)
        << implementation << ", fused";
  }
}

// Kernels for few rows and for many, strips alone and in pairs.
TEST_P(GroupedGemm, AFastSumDependsOnItsRowAndItsWeightsAlone) {
  GemmCase gemm({.mode = GetParam(),
                 .weight_rows = 112,
                 .cols = odd_cols(GetParam()),
                 .expert_rows = {29},
                 .token_tile = 32,
                 .seed = 31});
  for (const std::string& implementation : implementations(GetParam())) {
    const GemmRun run{.implementation = implementation, .accumulation = Accumulation::kFast};
    const auto all = gemm.run(run);
    for (const int32_t rows : {1, 2, 3, 4, 5, 13}) {
      const auto fewer = gemm.run_rows(run, rows);
      const auto end = static_cast<ptrdiff_t>(int64_t{rows} * 112 * 4);
      EXPECT_TRUE(std::equal(all.begin(), all.begin() + end, fewer.begin()))
          << implementation << " " << rows;
    }
    const ThreadLimit one_thread(1);
    EXPECT_EQ(gemm.run(run), all) << implementation << ", one thread";
  }
}

TEST_P(GroupedGemm, DependsOnNeitherWorkspaceContentsNorThreadsNorScaleLayouts) {
  const GemmCase gemm({.mode = GetParam(),
                       .weight_rows = 160,
                       .cols = odd_cols(GetParam()),
                       .expert_rows = {64, 0, 17, 3},
                       .token_tile = 16,
                       .seed = 13});
  for (const Accumulation accumulation : {Accumulation::kFp32, Accumulation::kFp64}) {
    GemmRun run{.accumulation = accumulation};
    const auto expected = gemm.run(run);
    run.workspace_poison = 0x00;
    EXPECT_EQ(gemm.run(run), expected) << "zeroed workspace";
    run.layout = ScaleLayoutId::kSwizzled128x4;
    EXPECT_EQ(gemm.run(run), expected) << "swizzled scales";
    const ThreadLimit one_thread(1);
    EXPECT_EQ(gemm.run(run), expected) << "one thread";
  }
}

TEST_P(GroupedGemm, WritesValidRowsOnly) {
  for (const int32_t tile : {1, 2, 8, 128}) {
    const GemmCase gemm({.mode = GetParam(),
                         .weight_rows = 16,
                         .cols = odd_cols(GetParam()),
                         .expert_rows = {0, 2, 130, 0, 1},
                         .token_tile = tile,
                         .seed = 17});
    for (const auto* implementation : kImplementations) {
      const auto output = gemm.run({.implementation = implementation});
      std::vector<uint8_t> untouched = output;
      for (const auto& row : gemm.rows()) {
        EXPECT_FALSE(std::isnan(output_element(DType::kF32, output, row.row * 16)));
        std::memset(untouched.data() + row.row * 16 * 4, 0xFF, 16 * 4);
      }
      EXPECT_EQ(untouched, std::vector<uint8_t>(output.size(), 0xFF)) << implementation;
    }
  }
}

TEST_P(GroupedGemm, KeepsNanInItsRow) {
  GemmCase gemm({.mode = GetParam(),
                 .weight_rows = 32,
                 .cols = odd_cols(GetParam()),
                 .expert_rows = {6, 3},
                 .seed = 19});
  const auto before = gemm.run({});
  std::vector<std::vector<uint8_t>> fast_before;
  for (const std::string& implementation : implementations(GetParam())) {
    fast_before.push_back(
        gemm.run({.implementation = implementation, .accumulation = Accumulation::kFast}));
  }
  // Row 2 becomes NaN: by its values, or where E2M1 has no NaN by its scales.
  const bool by_scale = moe_mode_info(GetParam()).input == RowFormat::kNvfp4 ||
                        moe_mode_info(GetParam()).input == RowFormat::kNvfp4PerToken;
  std::vector<uint8_t>& bytes = by_scale ? gemm.input_scales : gemm.input_codes;
  const size_t row_bytes = bytes.size() / static_cast<size_t>(gemm.input_rows());
  std::memset(bytes.data() + 2 * row_bytes, 0xFF, row_bytes);
  const auto check = [&](const std::vector<uint8_t>& expected, const std::vector<uint8_t>& after) {
    for (const auto& row : gemm.rows()) {
      for (int64_t n = 0; n < 32; ++n) {
        const int64_t at = row.row * 32 + n;
        if (row.row == 2) {
          uint32_t bits = 0;
          std::memcpy(&bits, after.data() + at * 4, 4);
          EXPECT_EQ(bits, 0x7FFFFFFFU);
        } else {
          EXPECT_EQ(output_element(DType::kF32, after, at),
                    output_element(DType::kF32, expected, at));
        }
      }
    }
  };
  check(before, gemm.run({}));
  for (size_t i = 0; i < fast_before.size(); ++i) {
    check(fast_before[i], gemm.run({.implementation = implementations(GetParam())[i],
                                    .accumulation = Accumulation::kFast}));
  }
}

TEST_P(GroupedGemm, NanScaleOfZerosStaysInItsWeightRow) {
  GemmCase gemm({.mode = GetParam(), .expert_rows = {9, 4}, .token_tile = 16, .seed = 12});
  if (!gemm.plant_nan_scale_of_zeros(5)) GTEST_SKIP() << "no block scales in bytes";
  const auto check = [&](const GemmRun& run) {
    const auto output = gemm.run(run);
    for (const auto& row : gemm.rows()) {
      for (int64_t n = 0; n < gemm.spec().weight_rows; ++n) {
        const double got =
            output_element(DType::kF32, output, row.row * gemm.spec().weight_rows + n);
        ASSERT_EQ(std::isnan(got), row.expert == 0 && n == 5)
            << run.implementation << " row " << row.row << " column " << n;
      }
    }
  };
  for (const auto* implementation : kImplementations) check({.implementation = implementation});
  for (const std::string& implementation : implementations(GetParam())) {
    check({.implementation = implementation, .accumulation = Accumulation::kFast});
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, GroupedGemm, ::testing::ValuesIn(every_moe_mode()), mode_test_name);

TEST(GroupedGemmRows, TransposedScalesMeanTheSame) {
  const GemmCaseSpec spec{.mode = MoeMode::kFp8Block,
                          .weight_rows = 128,
                          .cols = 640,
                          .expert_rows = {3, 4},
                          .transposed_scales = true,
                          .data = GemmData::kIntegers,
                          .seed = 23};
  const GemmCase gemm(spec);
  for (const auto* implementation : kImplementations) {
    const auto output = gemm.run({.implementation = implementation});
    for (const auto& row : gemm.rows()) {
      ASSERT_EQ(output_element(DType::kF32, output, row.row * 128 + 5),
                gemm.expected(row, 5).value);
    }
  }
}

// As in a layer whose shard has few of the experts.
TEST(GroupedGemmRows, AreDecodedOnlyWhereAnExpertReadsThem) {
  GemmCase gemm({.mode = MoeMode::kMxfp4Mxfp8,
                 .cols = 1024,
                 .expert_rows = {60},
                 .token_tile = 64,
                 .gathers = true,
                 .seed = 37});
  const std::array<int32_t, 2> row_end{2, 0};  // The second tile is not in use.
  for (const std::string& implementation : implementations()) {
    if (implementation == "cpu_reference") continue;  // It decodes as it multiplies.
    const ForcedImplementation forced("grouped_gemm", implementation);
    const auto weights = GroupedWeights::prepare(gemm.weights(), gemm.spec().mode);
    for (const Accumulation accumulation : {Accumulation::kFp64, Accumulation::kFast}) {
      const int64_t size = grouped_gemm_workspace(weights, gemm.input_rows(), accumulation);
      const GuardedBuffer workspace(size, {.poison = 0xEE, .guard = Guard::kPage});
      std::vector<float> output(static_cast<size_t>(gemm.max_rows() * 32));
      GroupedGemmArgs args = gemm.args();
      args.permutation.tile_row_end = TensorView::contiguous(row_end.data(), DType::kI32, {2});
      args.accumulation = accumulation;
      args.output = TensorView::contiguous(output.data(), DType::kF32, {gemm.max_rows(), 32});
      grouped_gemm(args, weights, TensorView::contiguous(workspace.data(), DType::kU8, {size}));
      const auto left = std::ranges::count(workspace.copy(), 0xEE);
      EXPECT_GT(left, size / gemm.input_rows() * (gemm.input_rows() - 3)) << implementation;
    }
  }
}

TEST(GroupedGemmRows, Fp32RowsKeepTheirBits) {
  const GemmCase gemm({.mode = MoeMode::kNvfp4Bf16,
                       .weight_rows = 32,
                       .cols = 80,
                       .expert_rows = {5, 2},
                       .fp32_rows = true,
                       .seed = 29});
  const auto output = gemm.run({.accumulation = Accumulation::kFp64, .output = DType::kF64});
  for (const auto& row : gemm.rows()) {
    const auto expected = gemm.expected(row, 3);
    ASSERT_NEAR(output_element(DType::kF64, output, row.row * 32 + 3), expected.value,
                0x1p-45 * expected.magnitude);
  }
}

// Rows of all magnitudes: products that fp32 has, that it rounds to denormals, and that are beyond
// it. Weight row 5 has a small scale beside a block of zeros, whose own scale says nothing.
TEST(GroupedGemmRows, ProductsAtTheEndsOfTheRangeAreRoundedAlike) {
  std::mt19937 random(43);
  for (const MoeMode mode : {MoeMode::kBf16, MoeMode::kMxfp4Bf16, MoeMode::kMxfp4Int8}) {
    GemmCase gemm({.mode = mode,
                   .cols = 64,
                   .expert_rows = {3, 40},
                   .token_tile = 64,
                   .wide_scales = false,
                   .seed = 41});
    if (mode != MoeMode::kBf16) {
      gemm.clear_weights(5, 0);
      gemm.set_weight_scale(5, 0, 0);
      gemm.set_weight_scale(5, 1, 127 - 110);
    }
    for (const int exponent : {-133, -126, -122, -110, -34, -20, 0, 110, 120, 126, 127}) {
      for (size_t i = 0; i < gemm.input_codes.size(); i += 2) {
        const auto bits = static_cast<uint32_t>(random());
        const float magnitude = std::ldexp(1 + static_cast<float>(bits % 128) / 128, exponent);
        const uint16_t code = float_to_bf16(bits % 1024 < 512 ? magnitude : -magnitude);
        std::memcpy(&gemm.input_codes[i], &code, sizeof(code));
      }
      const auto expected = gemm.run({.implementation = "cpu_reference"});
      for (const std::string& implementation : implementations(mode)) {
        EXPECT_EQ(gemm.run({.implementation = implementation}), expected)
            << name(mode) << " " << implementation << ", rows around 2^" << exponent;
        const bool is_fused = implementation == "cpu_avx512" || implementation == "cpu_avx2";
        if (is_fused && mode == MoeMode::kMxfp4Bf16 && exponent == -34) {
          EXPECT_NE(
              gemm.run({.implementation = implementation, .accumulation = Accumulation::kFast}),
              expected)
              << "fused operations round otherwise here";
        }
      }
    }
  }
}

// Fused multiply-adds stand for two operations only where the product is exact.
TEST(GroupedGemmRows, FactorsInTheRangeHaveExactProducts) {
  int accepted = 0;
  for (int j = -140; j <= 127; ++j) {
    const ExactFactors factors(MagnitudeRange{.least = j, .most = j});
    const float w = std::ldexp(0x1.FEp0F, j);
    for (int i = -149; i <= 127; ++i) {
      const float x = std::ldexp(i < -142 ? 1.0F : 0x1.FEp0F, i);
      if (!factors.have_all(&x, 1)) continue;
      ++accepted;
      const float product = x * w;
      ASSERT_TRUE(std::isfinite(product)) << i << " " << j;
      ASSERT_EQ(static_cast<double>(product), static_cast<double>(x) * static_cast<double>(w))
          << i << " " << j;
    }
    const float zeros[] = {0.0F, -0.0F};
    EXPECT_TRUE(factors.have_all(zeros, 2));
  }
  EXPECT_GT(accepted, 40000) << "most pairs are in the range";
  const MagnitudeRange range{.least = -30, .most = 7};
  EXPECT_EQ(MagnitudeRange::decoded(range.encoded()).least, -30);
  EXPECT_EQ(MagnitudeRange::decoded(range.encoded()).most, 7);
  EXPECT_NE(MagnitudeRange{}.encoded(), 0) << "0 is for weights of no known range";
}

TEST(GroupedGemmRows, FastSumsRefuseFp32Rows) {
  const GemmCase gemm({.mode = MoeMode::kBf16, .fp32_rows = true});
  expect_error(ErrorKind::kUnsupported, {"accumulation", "bf16"},
               [&] { (void)gemm.run({.accumulation = Accumulation::kFast}); });
}

// Every finite code with every scale byte: the products of a unit matrix are the weights. Those
// beyond fp32 are infinite by themselves and do not reach the zeros beside them, because the scale
// of a block multiplies its sum.
TEST(GroupedGemmRows, Bf16ProductsHaveEveryWeight) {
  const std::vector<std::string> present = implementations();
  std::vector<std::pair<std::string, MoeMode>> cases;
  for (const std::string bf16 : {"cpu_avx512_bf16", "cpu_amx_bf16"}) {
    if (std::ranges::count(present, bf16) == 0) continue;
    for (const MoeMode mode : every_moe_mode()) {
      if (!has_int8_rows(mode)) cases.emplace_back(bf16, mode);
    }
  }
  if (cases.empty()) GTEST_SKIP() << "needs AVX-512 BF16";
  for (const auto& [bf16, mode] : cases) {
    const GemmCase gemm({.mode = mode,
                         .weight_rows = 512,
                         .cols = 128,
                         .expert_rows = {128},
                         .token_tile = 128,
                         .data = GemmData::kEveryWeight});
    const auto output = gemm.run({.implementation = bf16, .accumulation = Accumulation::kFast});
    for (const auto& row : gemm.rows()) {
      for (int64_t n = 0; n < 512; ++n) {
        const auto expected = static_cast<float>(gemm.expected(row, n).value);
        const double got = output_element(DType::kF32, output, row.row * 512 + n);
        ASSERT_TRUE(got == expected || (std::isnan(got) && std::isnan(expected)))
            << bf16 << " " << name(mode) << " " << row.row << " " << n << ": " << got << " for "
            << expected;
      }
    }
  }
}

TEST(GroupedGemmRows, NoRowsWriteNothing) {
  const GemmCase gemm({.mode = MoeMode::kMxfp4Bf16, .expert_rows = {0, 0}});
  EXPECT_EQ(gemm.run({}),
            std::vector<uint8_t>(static_cast<size_t>(gemm.max_rows()) * 32 * 4, 0xFF));
}

// A case whose rows tests fill: the first output of row 0 is the sum of a few exact terms.
class ExactTerms {
 public:
  ExactTerms()
      : gemm_({.mode = MoeMode::kBf16,
               .weight_rows = 16,
               .cols = 512,
               .expert_rows = {1},
               .fp32_rows = true,
               .data = GemmData::kIntegers}) {
    std::fill_n(gemm_.input_codes.begin(), gemm_.input_codes.size(), uint8_t{0});
    for (int64_t k = 0; k < 512; ++k) {
      const double weight = std::abs(gemm_.weight(0, 0, k));
      if (weight == 1 || weight == 2 || weight == 4) columns_.push_back(k);
    }
  }
  // Adds a product to the sum, at the given fraction of K.
  void set_term(double fraction, double product) {
    const int64_t k = columns_[static_cast<size_t>(
        std::lround(fraction * static_cast<double>(columns_.size() - 1)))];
    const auto value = static_cast<float>(product / gemm_.weight(0, 0, k));
    std::memcpy(gemm_.input_codes.data() + k * 4, &value, 4);
  }
  [[nodiscard]] double result(const GemmRun& run) const {
    return output_element(run.output, gemm_.run(run), 0);
  }

 private:
  GemmCase gemm_;
  std::vector<int64_t> columns_;
};

TEST(GroupedGemmSums, RunInAscendingKInTheTypeAskedFor) {
  ExactTerms gemm;
  gemm.set_term(0.1, 0x1p24);
  gemm.set_term(0.6, 1.0);
  gemm.set_term(1.0, -0x1p24);
  for (const auto* implementation : kImplementations) {
    GemmRun run{.implementation = implementation};
    EXPECT_EQ(gemm.result(run), 0.0);
    run.accumulation = Accumulation::kFp64;
    EXPECT_EQ(gemm.result(run), 1.0);
  }
  // The large terms first: nothing is lost.
  gemm.set_term(0.1, 0x1p24);
  gemm.set_term(0.6, -0x1p24);
  gemm.set_term(1.0, 1.0);
  for (const auto* implementation : kImplementations) {
    EXPECT_EQ(gemm.result({.implementation = implementation}), 1.0);
  }
}

// 1 + 2^-8 + 2^-40 is 1 + 2^-7 in bf16; by way of fp32, where it is a tie, it would be 1.
TEST(GroupedGemmOutput, Fp64SumsRoundToBf16Once) {
  for (const double sign : {1.0, -1.0}) {
    for (const double below : {1.0, -1.0}) {
      ExactTerms gemm;
      gemm.set_term(0.2, sign * (1 + 0x1p-8));
      gemm.set_term(0.3, sign * below * 0x1p-40);
      for (const auto* implementation : kImplementations) {
        const GemmRun run{.implementation = implementation,
                          .accumulation = Accumulation::kFp64,
                          .output = DType::kBF16};
        EXPECT_EQ(gemm.result(run), sign * (below > 0 ? 1 + 0x1p-7 : 1.0));
      }
    }
  }
}

TEST(GroupedGemmOutput, IgnoresTheCallersFloatingPointEnvironment) {
  const GemmCase gemm({.mode = MoeMode::kMxfp4Bf16, .data = GemmData::kRandom, .seed = 37});
  const auto expected = gemm.run({});
  const ControlWord word(kFlushToZero | kDenormalsAreZero | kRoundUp);
  for (const auto* implementation : kImplementations) {
    EXPECT_EQ(gemm.run({.implementation = implementation}), expected);
  }
}

}  // namespace
}  // namespace narrowfloat::testing
