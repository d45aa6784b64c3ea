// The kernels of each level of vector instructions give the bytes of the scalar formulas: for
// random bits, for numbers around ties and around the ends of the exponents, for any global scale,
// and for every number of blocks around a step of the kernels.
#include "ops/quantize/kernel_encoder.h"

#include <cmath>
#include <random>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "ops/quantize/row_source.h"
#include "runtime/vector_level.h"

namespace narrowfloat {
namespace {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  uint32_t below(uint32_t bound) { return static_cast<uint32_t>(engine_() % bound); }
  uint32_t bits() { return static_cast<uint32_t>(engine_()); }

 private:
  std::mt19937_64 engine_;
};

// The bits of an fp32 number of one of several kinds.
uint32_t sample(Random& random, uint32_t kind, uint32_t exponent) {
  const uint32_t fraction = random.bits() & 0x807FFFFFU;
  switch (kind) {
    case 0:
      return random.bits();
    case 1:
      return (exponent + random.below(20)) << 23 | fraction;
    case 2:  // Few significant bits: ties.
      return float_bits(std::ldexp(static_cast<float>(random.below(33)) / 4.0F - 4.0F,
                                   static_cast<int>(exponent / 2) - 60));
    case 3:
      return fraction;
    case 4:
      return random.below(9) == 0 ? fraction & 0x80000000U : exponent << 23 | fraction;
    default:  // Infinities and NaN among ties and numbers.
      if (random.below(50) == 0) return 0x7F800000U | (random.bits() & 0x80400001U);
      return (119U + random.below(16)) << 23 | (random.bits() & 0x80700000U) |
             (random.below(3) == 0 ? random.bits() & 0xFFFFFU : 0U);
  }
}

std::vector<uint8_t> sample_elements(Random& random, DType dtype, int64_t count) {
  std::vector<uint8_t> elements(static_cast<size_t>(count * element_bytes(dtype)));
  const uint32_t kind = random.below(6);
  const uint32_t exponent = random.below(220);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = sample(random, kind, exponent);
    const auto half = static_cast<uint16_t>(
        dtype == DType::kF16 && kind != 0 ? float_to_f16(bits_float(bits)) : bits >> 16);
    uint8_t* out = elements.data() + i * element_bytes(dtype);
    if (dtype == DType::kF32) {
      std::memcpy(out, &bits, sizeof(bits));
    } else {
      std::memcpy(out, &half, sizeof(half));
    }
  }
  return elements;
}

std::vector<uint32_t> bits_of(const std::vector<float>& x) {
  std::vector<uint32_t> bits;
  for (const float element : x) bits.push_back(float_bits(element));
  return bits;
}

float sample_encode_scale(Random& random) {
  const float any = bits_float(random.bits());
  const float usual = std::ldexp(1.0F, static_cast<int>(random.below(60)) - 27) * 1.37F;
  return random.below(4) == 0 ? any : usual;
}

template <BlockFormat Format, class Math>
void expect_the_formulas_bytes(const BlockKernels& kernels, const QuantizeProblem& problem,
                               const std::vector<uint8_t>& elements, float encode_scale,
                               float row_amax = 0.0F) {
  using Element = typename Format::Element;
  using Stored = typename Format::Stored;
  constexpr int64_t kCols = Format::kBlockCols;
  const ElementRun run{elements.data(), problem.input};
  const int64_t blocks =
      static_cast<int64_t>(elements.size()) / element_bytes(problem.input) / kCols;
  const auto code_bytes = static_cast<size_t>(blocks * kCols * Element::kBits / 8);
  RowScaling row;
  row.row_amax = row_amax;
  if constexpr (Format::kHasGlobalScale) {
    row.pair = Format::template scale_pair<Math>(encode_scale);
  }
  const KernelEncoder<Format, Math> encoder(problem, kernels);
  std::vector<Stored> expected_scales(kMaxKernelBlocks);
  std::vector<uint8_t> codes(code_bytes + 1, 0xEE);
  std::vector<uint8_t> expected_codes = codes;
  std::vector<Stored> kernel_scales(kMaxKernelBlocks);
  encoder.encode(run, blocks, row, kernel_scales.data(), codes.data());
  const BlockEncoder<Format, Math> formulas(problem);
  std::array<float, kCols> x;
  std::array<uint8_t, kCols> block_codes;
  for (int64_t i = 0; i < blocks; ++i) {
    widen(problem.input, run.from(i * kCols).first, kCols, x.data());
    expected_scales[static_cast<size_t>(i)] =
        formulas.encode(x.data(), kCols, row, block_codes.data());
    pack_codes<Element>(block_codes.data(), i * kCols, kCols, expected_codes.data());
  }
  EXPECT_EQ(codes, expected_codes) << Format::kName << " " << name(problem.input);
  EXPECT_EQ(std::memcmp(kernel_scales.data(), expected_scales.data(),
                        static_cast<size_t>(blocks) * sizeof(Stored)),
            0)
      << Format::kName << " " << name(problem.input);
}

template <BlockFormat Format>
void expect_the_formulas_bytes_in_both_modes(const BlockKernels& kernels, QuantizeProblem problem,
                                             const std::vector<uint8_t>& elements,
                                             float encode_scale) {
  problem.format = Format::kId;
  expect_the_formulas_bytes<Format, ExactMath>(kernels, problem, elements, encode_scale);
  problem.math = MathMode::kFast;
  expect_the_formulas_bytes<Format, FastMath>(kernels, problem, elements, encode_scale);
}

class KernelEncoderTest : public ::testing::TestWithParam<VectorLevel> {
 protected:
  static const BlockKernels& kernels_under_test() {
    return GetParam() == VectorLevel::kAvx2 ? kBlockKernelsAvx2 : kBlockKernelsAvx512;
  }
};

TEST_P(KernelEncoderTest, GivesTheBytesOfTheFormulas) {
  const Support support = cpu_with(Device{}, GetParam());
  if (!support.ok()) GTEST_SKIP() << support.reason();
  const BlockKernels& kernels = kernels_under_test();
  Random random(7);
  for (int i = 0; i < 400 && !HasFailure(); ++i) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      // The last block of 16 is alone in its step in half of the cases.
      const std::vector<uint8_t> elements =
          sample_elements(random, dtype, 128 * (1 + random.below(7)) + 16 * random.below(8));
      const float encode_scale = sample_encode_scale(random);
      QuantizeProblem problem;
      problem.input = dtype;
      problem.rules.input_max = largest_finite(dtype);
      problem.rules.mx_rounding = static_cast<Ue8m0Rounding>(random.below(3));
      expect_the_formulas_bytes_in_both_modes<Nvfp4>(kernels, problem, elements, encode_scale);
      expect_the_formulas_bytes_in_both_modes<Mxfp4>(kernels, problem, elements, encode_scale);
      expect_the_formulas_bytes_in_both_modes<Mxfp8>(kernels, problem, elements, encode_scale);
      expect_the_formulas_bytes_in_both_modes<Fp8Block1x128>(kernels, problem, elements,
                                                             encode_scale);
    }
  }
}

TEST_P(KernelEncoderTest, ChoosesBetweenFourAndSixLikeTheFormulas) {
  const Support support = cpu_with(Device{}, GetParam());
  if (!support.ok()) GTEST_SKIP() << support.reason();
  const BlockKernels& kernels = kernels_under_test();
  Random random(8);
  for (int i = 0; i < 1200 && !HasFailure(); ++i) {
    QuantizeProblem problem;
    problem.format = FormatId::kNvfp4;
    problem.input = std::array{DType::kF32, DType::kBF16, DType::kF16}[random.below(3)];
    problem.four_over_six = {.enabled = true,
                             .error = static_cast<FourOverSixError>(random.below(2)),
                             .error_math = static_cast<FourOverSixMath>(random.below(2)),
                             .e4m3_max = random.below(2) == 0 ? 448 : 256};
    const std::vector<uint8_t> elements =
        sample_elements(random, problem.input, 16 * (1 + random.below(40)));
    const float encode_scale = sample_encode_scale(random);
    // A per-token row's maximum belongs to its scale, but any must do.
    const float row_amax = random.below(2) == 0 ? 0.0F : std::fabs(bits_float(random.bits()));
    expect_the_formulas_bytes<Nvfp4, ExactMath>(kernels, problem, elements, encode_scale, row_amax);
    problem.math = MathMode::kFast;
    expect_the_formulas_bytes<Nvfp4, FastMath>(kernels, problem, elements, encode_scale, row_amax);
  }
}

// Rows of every source that the kernels make, any number of elements, at any address.
TEST_P(KernelEncoderTest, MakesTheRowsOfFusedQuantizers) {
  const Support support = cpu_with(Device{}, GetParam());
  if (!support.ok()) GTEST_SKIP() << support.reason();
  Random random(9);
  for (int i = 0; i < 1500 && !HasFailure(); ++i) {
    const int64_t cols = 1 + random.below(i % 50 == 0 ? 5000 : 400);
    QuantizeProblem problem;
    problem.source = static_cast<RowSourceKind>(1 + random.below(4));
    problem.input = random.below(2) == 0 ? DType::kBF16 : DType::kF16;
    problem.math = random.below(2) == 0 ? MathMode::kExact : MathMode::kFast;
    problem.rows = 1;
    problem.cols = cols;
    const std::vector<uint8_t> input = sample_elements(random, problem.input, 2 * cols);
    const std::vector<uint8_t> vector = sample_elements(random, problem.input, cols);
    const std::vector<uint8_t> residual = sample_elements(random, problem.input, cols);
    const auto rows_by = [&](const RowKernels* kernels) {
      std::vector<uint8_t> sum = residual;
      std::vector<uint8_t> norm(static_cast<size_t>(2 * cols));
      const QuantizeArgs args{.input = input.data(),
                              .vector = vector.data(),
                              .residual = sum.data(),
                              .norm_eps = 1e-5F,
                              .norm_output = norm.data()};
      const RowSource source(problem, args, kernels);
      if (problem.source == RowSourceKind::kAddRmsNorm) source.add_residual(0);
      source.store_norm(0);
      std::vector<float> loaded(static_cast<size_t>(cols));
      source.load(0, source.row_factor(0, 1.0F), 0, cols, loaded.data());
      return std::tuple(sum, norm, bits_of(loaded));
    };
    EXPECT_TRUE(rows_by(nullptr) == rows_by(&kernels_under_test().rows))
        << name(problem.source) << " " << name(problem.input) << " " << cols;
  }
}

// More codes than the caches hold, in rows that start anywhere in a cache line: what every task
// writes past the caches is there.
TEST_P(KernelEncoderTest, StoresLargeOutputsCompletely) {
  const Support support = cpu_with(Device{}, GetParam());
  if (!support.ok()) GTEST_SKIP() << support.reason();
  constexpr int64_t kRows = 2050;
  constexpr int64_t kCols = 8336;  // A segment of 144 columns at the end of each row.
  std::vector<uint16_t> input(static_cast<size_t>(kRows * kCols));
  for (size_t i = 0; i < input.size(); ++i) input[i] = static_cast<uint16_t>(0x3F00 + i % 611);
  const auto view = TensorView::contiguous(input.data(), DType::kBF16, {kRows, kCols});
  for (const FormatId format : {FormatId::kFp8Block1x128, FormatId::kFp8Tensor}) {
    const QuantizedLayout layout = quantized_layout(format, kRows, kCols);
    const auto run = [&](const char* pin) {
      std::vector<uint8_t> codes(static_cast<size_t>(layout.values_bytes), 0xEE);
      std::vector<float> scales(static_cast<size_t>(layout.scale_count));
      setenv("NARROWFLOAT_FORCE", pin, 1);
      quantize(view, layout.bind(codes.data(), scales.data(), nullptr));
      unsetenv("NARROWFLOAT_FORCE");
      return codes;
    };
    EXPECT_TRUE(run("quantize:cpu_baseline") ==
                run(GetParam() == VectorLevel::kAvx2 ? "quantize:cpu_avx2" : "quantize:cpu_avx512"))
        << name(format);
  }
}

INSTANTIATE_TEST_SUITE_P(All, KernelEncoderTest,
                         ::testing::Values(VectorLevel::kAvx2, VectorLevel::kAvx512),
                         [](const auto& test) {
                           return test.param == VectorLevel::kAvx2 ? "avx2" : "avx512";
                         });

}  // namespace
}  // namespace narrowfloat
