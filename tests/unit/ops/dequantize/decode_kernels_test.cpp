// The kernels of each level of vector instructions give the bytes of the scalar formulas, for every
// scale with every code; outputs that are written past the caches are complete.
#include "ops/dequantize/x86/decode_kernels.h"

#include <array>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#include "formats/registry.h"
#include "narrowfloat/quantize.h"
#include "runtime/vector_level.h"
#include "tensor/element_io.h"

namespace narrowfloat {
namespace {

constexpr std::array kTypes{DType::kF32, DType::kBF16, DType::kF16};

class DecodeKernelsTest : public ::testing::TestWithParam<VectorLevel> {
 protected:
  void SetUp() override {
    const Support support = cpu_with(Device{}, GetParam());
    if (!support.ok()) GTEST_SKIP() << support.reason();
  }
  static const DecodeKernels& kernels() {
    return GetParam() == VectorLevel::kAvx2 ? kDecodeKernelsAvx2 : kDecodeKernelsAvx512;
  }
};

// Codes with factors, as the kernel and as the formulas store them: each block's factor is another
// one. Leaves `blocks_left_out` blocks at the end as they are.
template <BlockFormat Format>
void expect_values_of(const DecodeKernels& kernels, DecodedBlock block, float factor,
                      const std::vector<uint8_t>& codes, int64_t blocks_left_out) {
  using Element = typename Format::Element;
  constexpr int64_t kCols = Format::kBlockCols;
  const int64_t blocks =
      static_cast<int64_t>(codes.size()) * 8 / Element::kBits / kCols - blocks_left_out;
  const int64_t elems = blocks * kCols;
  std::vector<float> factors(kMaxDecodedBlocks, factor);
  for (size_t i = 0; i < factors.size(); ++i) {
    factors[i] *= 1.0F + static_cast<float>(i) / kMaxDecodedBlocks;
  }
  std::vector<float> products;
  for (int64_t i = 0; i < elems; ++i) {
    const auto byte = static_cast<size_t>(i * Element::kBits / 8);
    const auto code = static_cast<uint8_t>(Element::kBits == 8 ? codes[byte]
                                           : i % 2 == 0        ? codes[byte] & 0xFU
                                                               : codes[byte] >> 4);
    products.push_back(mul_rn(Element::decode(code), factors[static_cast<size_t>(i / kCols)]));
  }
  for (size_t type = 0; type < kTypes.size(); ++type) {
    std::vector<uint8_t> expected(static_cast<size_t>(elems * element_bytes(kTypes[type])));
    std::vector<uint8_t> values(expected.size() + 1, 0xEE);
    narrow(kTypes[type], products.data(), elems, expected.data());
    expected.push_back(0xEE);
    kernels.values[static_cast<int>(block)][type](codes.data(), blocks, factors.data(),
                                                  values.data());
    ASSERT_EQ(values, expected) << Format::kName << " " << name(kTypes[type]) << " " << factor;
  }
}

// Every code, in blocks with NaN and without it.
template <BlockFormat Format>
void expect_values(const DecodeKernels& kernels, DecodedBlock block, float factor) {
  std::vector<uint8_t> codes(256);
  std::iota(codes.begin(), codes.end(), uint8_t{0});
  expect_values_of<Format>(kernels, block, factor, codes, 0);
  if constexpr (Format::Element::kBits == 8) {
    codes[0x7F] = 0x7E;
    codes[0xFF] = 0xFE;
  }
  expect_values_of<Format>(kernels, block, factor, codes, 1);
}

TEST_P(DecodeKernelsTest, GiveTheFormulasValuesForEveryScaleAndCode) {
  std::array<uint8_t, 256> scales;
  std::iota(scales.begin(), scales.end(), uint8_t{0});
  for (const float global :
       {1.0F, 0.37e-3F, 1e-40F, 3e38F, 0.0F, -2.5F, __builtin_inff(), bits_float(0xFFC01234U)}) {
    for (const bool divides : {false, true}) {
      for (size_t half = 0; half < 256; half += kMaxDecodedBlocks) {
        std::array<float, kMaxDecodedBlocks> factors;
        kernels().e4m3_factors(scales.data() + half, kMaxDecodedBlocks, global, divides,
                               factors.data());
        for (size_t i = 0; i < factors.size(); ++i) {
          const float scale = E4M3::decode(scales[half + i]);
          const float expected = divides ? div_rn(scale, global) : mul_rn(scale, global);
          ASSERT_EQ(float_bits(canonical_nan(factors[i])), float_bits(canonical_nan(expected)))
              << half + i << " with " << global;
          expect_values<Nvfp4>(kernels(), DecodedBlock::kE2M1Of16, factors[i]);
        }
      }
    }
  }
  for (size_t half = 0; half < 256; half += kMaxDecodedBlocks) {
    std::array<float, kMaxDecodedBlocks> factors;
    kernels().ue8m0_factors(scales.data() + half, kMaxDecodedBlocks, factors.data());
    for (size_t i = 0; i < factors.size(); ++i) {
      ASSERT_EQ(float_bits(factors[i]), float_bits(UE8M0::decode(scales[half + i])));
      expect_values<Mxfp4>(kernels(), DecodedBlock::kE2M1Of32, factors[i]);
      expect_values<Mxfp8>(kernels(), DecodedBlock::kE4M3Of32, factors[i]);
      for (const float scale : {1.37F, -1.37F, 0.0F}) {
        expect_values<Fp8Block1x128>(kernels(), DecodedBlock::kE4M3Of128, factors[i] * scale);
      }
    }
  }
}

TEST_P(DecodeKernelsTest, StreamsEveryByteAndNoOther) {
  std::vector<uint8_t> from(400);
  std::iota(from.begin(), from.end(), uint8_t{1});
  for (size_t offset = 0; offset < 64; ++offset) {
    for (const size_t count : {0U, 1U, 63U, 64U, 65U, 130U, 300U}) {
      std::vector<uint8_t> to(500, 0xEE);
      std::vector<uint8_t> expected = to;
      std::copy_n(from.begin(), count, expected.begin() + static_cast<ptrdiff_t>(offset));
      kernels().stream(to.data() + offset, from.data(), static_cast<int64_t>(count));
      kernels().finish_stream();
      ASSERT_EQ(to, expected) << count << " bytes at " << offset;
    }
  }
}

// More than the caches hold, in rows that start anywhere in a cache line.
TEST_P(DecodeKernelsTest, DequantizeLargeOutputsCompletely) {
  constexpr int64_t kRows = 2050;
  constexpr int64_t kCols = 2112;
  constexpr int64_t kStride = kCols + 3;
  std::vector<uint8_t> codes(static_cast<size_t>(kRows * kCols));
  uint32_t state = 1;
  for (uint8_t& code : codes)
    code = static_cast<uint8_t>((state = state * 1664525U + 1013904223U) >> 24);
  std::vector<float> scales(static_cast<size_t>(kRows * 17), 0.5F);
  for (size_t i = 0; i < scales.size(); ++i) scales[i] += static_cast<float>(i % 97);
  const QuantizedLayout layout = quantized_layout(FormatId::kFp8Block1x128, kRows, kCols,
                                                  {.scale_layout = ScaleLayoutId::kLinear});
  const QuantizedView view = layout.bind(codes.data(), scales.data(), nullptr);
  const auto run = [&](const char* pin) {
    std::vector<float> output(static_cast<size_t>(kRows * kStride), -1.0F);
    TensorView to = TensorView::contiguous(output.data(), DType::kF32, {kRows, kCols});
    to.strides = {kStride, 1};
    setenv("NARROWFLOAT_FORCE", pin, 1);
    dequantize(view, to);
    unsetenv("NARROWFLOAT_FORCE");
    return output;
  };
  const std::vector<float> expected = run("dequantize:cpu_baseline");
  const std::vector<float> output =
      run(GetParam() == VectorLevel::kAvx2 ? "dequantize:cpu_avx2" : "dequantize:cpu_avx512");
  EXPECT_EQ(std::memcmp(output.data(), expected.data(), output.size() * sizeof(float)), 0);
}

INSTANTIATE_TEST_SUITE_P(All, DecodeKernelsTest,
                         ::testing::Values(VectorLevel::kAvx2, VectorLevel::kAvx512),
                         [](const auto& test) {
                           return test.param == VectorLevel::kAvx2 ? "avx2" : "avx512";
                         });

}  // namespace
}  // namespace narrowfloat
