// The scalar functions that device code shares with the host, and the instructions that have a
// model there: the same bits for all arguments, or for a dense sample where the
// host would take too long.
#include <array>
#include <atomic>
#include <vector>

#include <fmt/format.h>

#include "base/portable_math.h"
#include "cuda/bulk_kernels.h"
#include "cuda/gpu_test.h"
#include "cuda/math_kernels.h"
#include "formats/e2m1_grid.h"
#include "formats/fp8_block.h"
#include "formats/math_policy.h"
#include "formats/minifloat.h"
#include "formats/nvfp4.h"
#include "runtime/parallel.h"
#include "support/random.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kAll = int64_t{1} << 32;
constexpr int64_t kChunk = int64_t{1} << 26;
constexpr uint32_t kOne = 0x3F800000U;

BlockScale<float> group_scale(float amax) {
  return Fp8Block1x128::block_scale<ExactMath>(amax, ScalePair{}, BlockRules{});
}

uint32_t on_host(UnaryFunction function, float x) {
  switch (function) {
    case UnaryFunction::kExp:
      return float_bits(exp_portable(x));
    case UnaryFunction::kTanh:
      return float_bits(tanh_portable(x));
    case UnaryFunction::kSigmoid:
    case UnaryFunction::kRouterSigmoid:
      return float_bits(sigmoid_by_tanh(x));
    case UnaryFunction::kNormalCdf:
      return float_bits(normal_cdf(x));
    case UnaryFunction::kReciprocalRoot:
      return float_bits(canonical_nan(rsqrt_rn(x)));
    case UnaryFunction::kReciprocal:
      return float_bits(FastMath::rcp(x));
    case UnaryFunction::kToE4m3:
      return E4M3::encode(x);
    case UnaryFunction::kToE2m1:
      return E2M1::encode(x);
    case UnaryFunction::kNewtonReciprocal:
      return float_bits(div_rn(1.0F, x));
    case UnaryFunction::kE2m1Grid:
      return float_bits(E2M1::decode(E2M1::encode(x / kE2m1Prescale)) * kE2m1Prescale);
    case UnaryFunction::kGroupScale:
      return float_bits(group_scale(x).stored);
    case UnaryFunction::kGroupMultiplier:
      return float_bits(group_scale(x).multiplier);
  }
  return 0;
}

float on_host(BinaryFunction function, float a, float b) {
  switch (function) {
    case BinaryFunction::kMultiply:
      return FastMath::mul(a, b);
    case BinaryFunction::kAdd:
      return FastMath::add(a, b);
    case BinaryFunction::kDivide:
      return FastMath::div(a, b);
    case BinaryFunction::kTokenEncodeScale:
      return Nvfp4PerToken::row_scale<ExactMath>(a, b).pair.encode;
    case BinaryFunction::kTokenDecodeScale:
      return Nvfp4PerToken::row_scale<ExactMath>(a, b).pair.decode;
    case BinaryFunction::kDivideByKnown:
      return div_rn(a, b);
  }
  return 0.0F;
}

class GpuMath : public GpuTest {
 protected:
  static void expect_same(UnaryFunction function, const BitRange& range) {
    const int64_t size = std::min(range.count, kChunk);
    const DeviceBuffer device(size * 4);
    std::vector<uint32_t> results(static_cast<size_t>(size));
    for (int64_t at = 0; at < range.count; at += kChunk) {
      BitRange chunk = range;
      chunk.first += static_cast<uint32_t>(at) * range.stride;
      chunk.count = std::min(kChunk, range.count - at);
      evaluate_on_gpu(function, chunk, device);
      device.read(results.data(), chunk.count * 4);
      ASSERT_EQ(first_difference(function, chunk, results), "");
    }
  }

  // The first difference of a chunk, found on all cores.
  static std::string first_difference(UnaryFunction function, const BitRange& chunk,
                                      const std::vector<uint32_t>& results) {
    std::atomic<int64_t> first{chunk.count};
    parallel_for(chunk.count, 1 << 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end && i < first; ++i) {
        const uint32_t bits = chunk.first + static_cast<uint32_t>(i) * chunk.stride;
        if (on_host(function, bits_float(bits)) == results[static_cast<size_t>(i)]) continue;
        int64_t earlier = first;
        while (i < earlier && !first.compare_exchange_weak(earlier, i)) continue;
      }
    });
    if (first == chunk.count) return {};
    const uint32_t bits = chunk.first + static_cast<uint32_t>(first) * chunk.stride;
    return fmt::format("function {} of {:#010x} is {:#x}, expected {:#x}",
                       static_cast<int>(function), bits, results[static_cast<size_t>(first.load())],
                       on_host(function, bits_float(bits)));
  }

  static void expect_sample_same(UnaryFunction function, uint32_t stride) {
    expect_same(function, {.stride = stride, .count = kAll / stride});
  }
};

TEST_F(GpuMath, TheExponentialIsTheHosts) { expect_sample_same(UnaryFunction::kExp, 1); }

TEST_F(GpuMath, TheHyperbolicTangentIsTheHosts) { expect_sample_same(UnaryFunction::kTanh, 1); }

// All arguments, on the GPU alone: the portable sigmoid is the host's.
TEST_F(GpuMath, TheRoutersSigmoidIsThePortableOne) {
  const DeviceBuffer portable(kChunk * 4);
  const DeviceBuffer router(kChunk * 4);
  for (int64_t first = 0; first < kAll; first += kChunk) {
    const BitRange chunk{.first = static_cast<uint32_t>(first), .count = kChunk};
    evaluate_on_gpu(UnaryFunction::kSigmoid, chunk, portable);
    evaluate_on_gpu(UnaryFunction::kRouterSigmoid, chunk, router);
    ASSERT_EQ(count_differences(portable, router), 0) << "from " << chunk.first;
  }
}

TEST_F(GpuMath, OtherFunctionsAreTheHosts) {
  expect_sample_same(UnaryFunction::kSigmoid, 61);
  expect_sample_same(UnaryFunction::kNormalCdf, 61);
  expect_sample_same(UnaryFunction::kReciprocalRoot, 61);
  // All mantissas with even and odd exponents.
  expect_same(UnaryFunction::kReciprocalRoot, {.first = kOne, .count = 1 << 24});
}

TEST_F(GpuMath, TheReciprocalIsTheTables) {
  expect_same(UnaryFunction::kReciprocal, {.first = kOne, .count = 1 << 23});
  expect_sample_same(UnaryFunction::kReciprocal, 61);
}

// For all mantissas, near 1 and near the ends of the range that kernels use it in.
TEST_F(GpuMath, OneNewtonStepIsCorrectlyRounded) {
  for (const float first : {1.0F, 0x1p-110F, 0x1p109F}) {
    expect_same(UnaryFunction::kNewtonReciprocal, {.first = float_bits(first), .count = 1 << 23});
  }
}

// All floats in the range.
TEST_F(GpuMath, RoundingToTheE2m1GridIsTheCodes) {
  expect_same(UnaryFunction::kE2m1Grid, {.count = int64_t{float_bits(kE2m1FastLimit)}});
}

// For all mantissas, near 1 and at the ends of the range where it says it is right; and for a
// maximum of zero.
TEST_F(GpuMath, TheQuickScaleOfAGroupIsThatOfTheDivisions) {
  for (const auto function : {UnaryFunction::kGroupScale, UnaryFunction::kGroupMultiplier}) {
    for (const float first : {1.0F, 0x1p-100F, 0x1p99F}) {
      expect_same(function, {.first = float_bits(first), .count = 1 << 23});
    }
    expect_same(function, {.first = 0, .count = 1});
  }
}

TEST_F(GpuMath, ConversionsAreTheFormats) {
  expect_sample_same(UnaryFunction::kToE4m3, 13);
  // An instruction on some architectures.
  expect_sample_same(UnaryFunction::kToE2m1, 61);
}

// A pair whose exact result lies within a few ulp of 2^-126, where flushing decides.
std::array<float, 2> tiny_pair(BinaryFunction function, Random& random) {
  const auto a = bits_float(static_cast<uint32_t>(random.range(1, 127) << 23) |
                            (random.bits32() & 0x807FFFFFU));
  const auto ulps = static_cast<uint32_t>(random.range(-4, 4));
  const auto nearby = [&](double value) {
    return bits_float(float_bits(static_cast<float>(value)) + ulps);
  };
  const auto wide = static_cast<double>(a);
  if (function == BinaryFunction::kMultiply) return {a, nearby(0x1p-126 / wide)};
  if (function == BinaryFunction::kDivide) return {nearby(0x1p-126 / wide), 1.0F / a};
  const float small =
      bits_float(static_cast<uint32_t>(random.range(1, 3) << 23) | (random.bits32() & 0x807FFFFFU));
  return {small, nearby(0x1p-126 - static_cast<double>(small))};
}

TEST_F(GpuMath, FlushingArithmeticIsItsModels) {
  constexpr size_t kPairs = 1 << 22;
  for (const auto function :
       {BinaryFunction::kMultiply, BinaryFunction::kAdd, BinaryFunction::kDivide}) {
    Random random(static_cast<uint64_t>(function));
    std::vector<float> a(kPairs);
    std::vector<float> b(kPairs);
    for (size_t i = 0; i < kPairs; ++i) {
      std::array<float, 2> pair{bits_float(random.bits32()), bits_float(random.bits32())};
      if (i % 2 == 0) pair = tiny_pair(function, random);
      a[i] = pair[0];
      b[i] = pair[1];
    }
    const std::vector<float> results = evaluate_on_gpu(function, a, b);
    for (size_t i = 0; i < kPairs; ++i) {
      ASSERT_EQ(float_bits(canonical_nan(on_host(function, a[i], b[i]))), float_bits(results[i]))
          << static_cast<int>(function) << ": " << fmt::format("{:a} {:a}", a[i], b[i]);
    }
  }
}

// The numbers of a binade as first operands, one second operand for all.
void expect_binade_same(BinaryFunction function, float first, float second) {
  std::vector<float> a(1 << 23);
  for (size_t i = 0; i < a.size(); ++i) {
    a[i] = bits_float(float_bits(first) + static_cast<uint32_t>(i));
  }
  const std::vector<float> b(a.size(), second);
  const std::vector<float> results = evaluate_on_gpu(function, a, b);
  for (size_t i = 0; i < a.size(); ++i) {
    const float expected = on_host(function, a[i], second);
    if (float_bits(expected) == float_bits(results[i])) continue;
    ADD_FAILURE() << fmt::format("function {} of {:a} {:a} is {:a}, expected {:a}",
                                 static_cast<int>(function), a[i], second, results[i], expected);
    return;
  }
}

// For all mantissas, at the usual base decode scales and at the ends of the range of those that go
// without divisions; maxima in the middle and at the ends of theirs.
TEST_F(GpuMath, TheScaleOfATokensRowIsTheFormats) {
  for (const auto function :
       {BinaryFunction::kTokenEncodeScale, BinaryFunction::kTokenDecodeScale}) {
    for (const float base : {1.0F / 2688.0F, 1.0F / 1536.0F, 1.0F / 3.0F, 0x1p-30F, 0x1.8p29F}) {
      expect_binade_same(function, 1.0F, base);
    }
    for (const float first : {0x1p-60F, 0x1p59F}) {
      expect_binade_same(function, first, 1.0F / 2688.0F);
    }
  }
}

TEST_F(GpuMath, DivisionByAKnownNumberIsTheDivision) {
  for (const float divisor : {1.0F, 6.0F, 1536.0F, 2688.0F}) {
    expect_binade_same(BinaryFunction::kDivideByKnown, 1.0F, divisor);
  }
}

}  // namespace
}  // namespace narrowfloat::testing
