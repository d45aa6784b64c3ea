// The activations of moe spec 6.2: fp32 against the formulas as they are written there in long
// double, the double version likewise, exact cases, limits, very negative gates, NaN.
#include "ops/activation/activation_math.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include <gtest/gtest.h>

#include "formats/silu.h"
#include "support/random.h"
#include "support/special_floats.h"

namespace narrowfloat::testing {
namespace {

using Kind = ActivationKind;
using Wide = long double;

constexpr ActivationParams<float> kPlain{1.0F, 0.0F, kFloatInfinity, kFloatInfinity};

Wide sigma(Wide z) { return 1 / (1 + std::exp(-z)); }
Wide gelu_erf(Wide x) { return x * std::erfc(-x / std::numbers::sqrt2_v<Wide>) / 2; }
// 1 + tanh z = exp z / cosh z: the sum would cancel for negative z.
Wide gelu_tanh(Wide x) {
  const Wide z = 0.7978845608L * (x + 0.044715L * x * x * x);
  return 0.5L * x * std::exp(z) / std::cosh(z);
}

Wide expected(Kind kind, Wide u, Wide g, const ActivationParams<float>& params) {
  const Wide up = std::clamp<Wide>(u, -params.limit_up, params.limit_up);
  const Wide gate = std::min<Wide>(g, params.limit_gate);
  const Wide alpha = params.alpha;
  const Wide beta = params.beta;
  switch (kind) {
    case Kind::kIdentity:
      return u;
    case Kind::kRelu:
      return std::max<Wide>(u, 0);
    case Kind::kRelu2:
      return std::pow(std::max<Wide>(u, 0), 2);
    case Kind::kSilu:
      return u * sigma(u);
    case Kind::kGeluErf:
      return gelu_erf(u);
    case Kind::kGeluTanh:
      return gelu_tanh(u);
    case Kind::kSwiglu:
      return gate * sigma(alpha * gate) * (up + beta);
    case Kind::kSwigluStep:
      return std::min<Wide>(g * sigma(g), params.limit_gate) * up;
    case Kind::kGegluErf:
      return gelu_erf(g) * u;
    case Kind::kGegluTanh:
      return gelu_tanh(g) * u;
    case Kind::kSituGlu:
      return beta * std::tanh(up / beta) * alpha * std::tanh(gate / alpha) * sigma(gate);
  }
  return 0;
}

double ulps(Wide actual, Wide truth, int mantissa_bits) {
  if (actual == truth) return 0;
  const int exponent = std::max(std::ilogb(truth), -126);
  return static_cast<double>(std::ldexp(std::fabs(actual - truth), mantissa_bits - exponent));
}

// An exponential's argument carries a relative rounding error, so the result's grows with the
// argument; everything else is a few roundings.
double allowed_ulps(Kind kind, float u, float g, const ActivationParams<float>& params) {
  const double x = std::fabs(activation_info(kind).is_gated ? g : u);
  if (kind == Kind::kGeluTanh || kind == Kind::kGegluTanh) {
    return 5 + 5 * 1.5957691216 * (x + 0.044715 * x * x * x);
  }
  if (kind == Kind::kGeluErf || kind == Kind::kGegluErf) return 5.5;
  if (kind == Kind::kSwiglu) return 4 + std::fabs(params.alpha * g);
  return kind == Kind::kSituGlu ? 6 : 4;
}

ActivationParams<float> params_of(Kind kind) {
  if (kind == Kind::kSwiglu) return {1.702F, 1.0F, 7.0F, 7.0F};
  if (kind == Kind::kSwigluStep) return {1.0F, 0.0F, 7.0F, 7.0F};
  if (kind == Kind::kSituGlu) return {4.0F, 25.0F, 30.0F, 40.0F};
  return kPlain;
}

class ActivationMath : public ::testing::TestWithParam<Kind> {};

TEST_P(ActivationMath, IsWithinAFewUlpOfTheFormula) {
  const ActivationParams<float> params = params_of(GetParam());
  Random random(17);
  double worst = 0;
  for (int i = 0; i < 200000; ++i) {
    const float scale = random.pick({0.1F, 1.0F, 4.0F, 10.0F});
    const float u = scale * random.normal();
    const float g = scale * random.normal();
    const Wide truth = expected(GetParam(), u, g, params);
    // If normal_cdf itself is denormal, its last places are gone.
    if (std::fabs(truth) < 1e-30L) continue;
    const float h = activated(GetParam(), u, g, params);
    const double error = ulps(h, truth, 23);
    worst = std::max(worst, error);
    ASSERT_LE(error, allowed_ulps(GetParam(), u, g, params)) << "u " << u << " g " << g;
  }
  const bool is_exact = GetParam() == Kind::kIdentity || GetParam() == Kind::kRelu;
  EXPECT_EQ(worst == 0, is_exact);
}

TEST_P(ActivationMath, IsCloseToTheFormulaInDouble) {
  const ActivationParams<float> params = params_of(GetParam());
  const ActivationParams<double> wide{params.alpha, params.beta, params.limit_gate,
                                      params.limit_up};
  Random random(18);
  for (int i = 0; i < 20000; ++i) {
    const double u = 4.0 * static_cast<double>(random.normal()) + 1e-9;
    const double g = 4.0 * static_cast<double>(random.normal()) + 1e-9;
    const Wide truth = expected(GetParam(), u, g, params);
    // Far below fp32's half ulp, 2^-25; the tails of gelu amplify.
    ASSERT_LE(std::fabs(activated(GetParam(), u, g, wide) - truth), std::fabs(truth) * 0x1p-44L)
        << "u " << u << " g " << g;
  }
}

TEST_P(ActivationMath, GivesNanForNan) {
  const ActivationParams<float> params = params_of(GetParam());
  EXPECT_TRUE(std::isnan(activated(GetParam(), kFloatNan, 1.0F, params)));
  if (!activation_info(GetParam()).is_gated) return;
  EXPECT_TRUE(std::isnan(activated(GetParam(), 1.0F, kFloatNan, params)));
  EXPECT_TRUE(std::isnan(activated(GetParam(), -100.0F, -kFloatNan, params)));
}

// Gates whose exponential overflows or vanishes give the limit of the formula, a number.
TEST_P(ActivationMath, IsANumberForEveryFiniteInput) {
  const ActivationParams<float> params = params_of(GetParam());
  for (const float g : {-3e38F, -1e30F, -1000.0F, -104.5F, -88.0F, 88.0F, 1000.0F, 1e30F}) {
    for (const float u : {-2.0F, 0.0F, 2.0F}) {
      const bool is_gated = activation_info(GetParam()).is_gated;
      const float h = activated(GetParam(), is_gated ? u : g, g, params);
      EXPECT_FALSE(std::isnan(h)) << u << " " << g;
      const bool vanishes = GetParam() != Kind::kIdentity && g < -200.0F;
      EXPECT_TRUE(!vanishes || h == 0.0F) << u << " " << g;
    }
  }
}

std::vector<Kind> all_kinds() {
  std::vector<Kind> kinds;
  for (const ActivationInfo& info : all_activations()) kinds.push_back(info.id);
  return kinds;
}

INSTANTIATE_TEST_SUITE_P(All, ActivationMath, ::testing::ValuesIn(all_kinds()),
                         [](const auto& test) { return std::string(name(test.param)); });

TEST(Swiglu, IsSiluMulToTheBitWithoutParameters) {
  Random random(3);
  for (int i = 0; i < 300000; ++i) {
    const float u = bits_float(random.bits32());
    const float g = i % 2 == 0 ? bits_float(random.bits32()) : 20.0F * random.normal();
    const float h = activated(Kind::kSwiglu, u, g, kPlain);
    const float plain = silu_mul<ExactMath>(g, u);
    ASSERT_EQ(float_bits(canonical_nan(h)), float_bits(canonical_nan(plain))) << u << " " << g;
  }
  EXPECT_EQ(float_bits(activated(Kind::kSwiglu, -0.0F, 1.0F, kPlain)), 0x80000000U);
}

// sigma is 0 or 1 for |g| >= 1, so the result is max(g, 0) * (u + beta) exactly (moe spec 12.4).
TEST(Swiglu, SaturatesExactlyWithASteepSlope) {
  for (const float beta : {0.0F, 1.0F}) {
    const ActivationParams<float> params{0x1p14F, beta, kFloatInfinity, kFloatInfinity};
    for (int g = -64; g <= 64; ++g) {
      for (int u = -16; u <= 16; ++u) {
        const auto gate = static_cast<float>(g);
        const auto up = static_cast<float>(u);
        EXPECT_EQ(activated(Kind::kSwiglu, up, gate, params), std::max(gate, 0.0F) * (up + beta));
      }
    }
  }
}

// 7 * sigma(1.702 * 7) = 6.99995..., times 8 or -6: from the definition, with a calculator.
TEST(Swiglu, OfGptOssClampsTheGateFromAboveOnly) {
  const ActivationParams<float> oai{1.702F, 1.0F, 7.0F, 7.0F};
  const auto h = [&](float u, float g) { return activated(Kind::kSwiglu, u, g, oai); };
  EXPECT_NEAR(h(7.0F, 7.0F), 55.99962F, 2e-5F);
  EXPECT_EQ(h(9.0F, 8.0F), h(7.0F, 7.0F));
  EXPECT_EQ(h(-9.0F, 100.0F), h(-7.0F, 7.0F));
  EXPECT_NEAR(h(-7.0F, 7.0F), -41.99972F, 2e-5F);
  EXPECT_NEAR(h(0.0F, 1.0F), 0.845795F, 1e-6F);
  // -8 is not raised to -7: the two differ.
  EXPECT_NEAR(h(0.0F, -8.0F), -9.76e-6F, 2e-8F);
  EXPECT_NEAR(h(0.0F, -7.0F), -4.687e-5F, 2e-8F);
}

TEST(SwigluStep, ClampsTheGateAfterSilu) {
  const ActivationParams<float> params{1.0F, 0.0F, 7.0F, 5.0F};
  EXPECT_EQ(activated(Kind::kSwigluStep, 2.0F, 100.0F, params), 14.0F);
  EXPECT_EQ(activated(Kind::kSwigluStep, -6.0F, 100.0F, params), -35.0F);
  // Clamping before would give 7 * sigma(7) = 6.9936.
  EXPECT_EQ(activated(Kind::kSwigluStep, 1.0F, 7.01F, params), 7.0F);
}

TEST(SituGlu, CapsBothHalvesAndLeavesTheSigmoidUncapped) {
  const ActivationParams<float> params{4.0F, 25.0F, kFloatInfinity, kFloatInfinity};
  EXPECT_EQ(activated(Kind::kSituGlu, 1e6F, 1e6F, params), 100.0F);
  EXPECT_EQ(activated(Kind::kSituGlu, -1e6F, 1e6F, params), -100.0F);
  // The sigmoid of the capped gate, -4, would leave -1.8.
  EXPECT_EQ(activated(Kind::kSituGlu, 1e6F, -200.0F, params), 0.0F);
  EXPECT_NEAR(activated(Kind::kSituGlu, 25.0F, 4.0F, params), 25 * 4 * 0.58002566 * 0.98201379,
              1e-4);
}

TEST(Relu, HasNoNegativeZero) {
  for (const Kind kind : {Kind::kRelu, Kind::kRelu2}) {
    EXPECT_EQ(float_bits(activated(kind, -0.0F, 0.0F, kPlain)), 0U);
    EXPECT_EQ(float_bits(activated(kind, -kFloatInfinity, 0.0F, kPlain)), 0U);
    EXPECT_EQ(activated(kind, kFloatInfinity, 0.0F, kPlain), kFloatInfinity);
  }
  EXPECT_EQ(activated(Kind::kRelu2, 3.0F, 0.0F, kPlain), 9.0F);
}

}  // namespace
}  // namespace narrowfloat::testing
