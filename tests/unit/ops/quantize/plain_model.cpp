// See plain_model.h.
#include "unit/ops/quantize/plain_model.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "support/special_floats.h"

namespace narrowfloat::testing {
namespace {

constexpr float kMax = std::numeric_limits<float>::max();

float flush(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0F, x) : x; }

// Nearest of the magnitudes, ties to the even index.
template <size_t kSize>
uint8_t nearest(const std::array<double, kSize>& magnitudes, double x) {
  size_t best = 0;
  for (size_t i = 1; i < kSize; ++i) {
    const double better = std::abs(magnitudes[best] - x) - std::abs(magnitudes[i] - x);
    if (better > 0 || (better == 0 && i % 2 == 0)) best = i;
  }
  return static_cast<uint8_t>(best);
}

std::array<double, 127> e4m3_magnitudes() {
  std::array<double, 127> magnitudes{};
  for (int code = 0; code < 127; ++code) {
    const int exponent = code / 8;
    const double mantissa = code % 8 / 8.0;
    magnitudes[static_cast<size_t>(code)] =
        exponent == 0 ? std::ldexp(mantissa, -6) : std::ldexp(1.0 + mantissa, exponent - 7);
  }
  return magnitudes;
}

float largest_magnitude(const std::vector<float>& x) {
  float largest = 0.0F;
  for (const float value : x) {
    if (!std::isnan(value)) largest = std::max(largest, std::abs(value));
  }
  return largest;
}

constexpr std::array<double, 8> kE2M1{0, 0.5, 1, 1.5, 2, 3, 4, 6};

float sum_of_leaves(const std::vector<float>& leaves, size_t first, size_t count) {
  if (count == 1) return first < leaves.size() ? leaves[first] : 0.0F;
  const float left = sum_of_leaves(leaves, first, count / 2);
  const float right = sum_of_leaves(leaves, first + count / 2, count / 2);
  return left + right;
}

// E(x) of spec 6.12.
float model_exp(float x) {
  if (std::isnan(x)) return x;
  if (x > 89.0F) return kFloatInfinity;
  if (x < -104.0F) return 0.0F;
  const float n = std::nearbyint(x * 0x1.715476p0F);
  float r = std::fma(n, -0x1.62e400p-1F, x);
  r = std::fma(n, -0x1.7f7d1cp-20F, r);
  float p = 1.0F / 5040.0F;
  for (const float c :
       {1.0F / 720.0F, 1.0F / 120.0F, 1.0F / 24.0F, 1.0F / 6.0F, 0.5F, 1.0F, 1.0F}) {
    p = std::fma(p, r, c);
  }
  const int exponent = static_cast<int>(n);
  const int half = static_cast<int>(std::floor(n / 2.0F));
  return std::ldexp(std::ldexp(p, half), exponent - half);
}

}  // namespace

float multiply(float x, float y, MathMode math) {
  if (math == MathMode::kExact) return x * y;
  const float a = flush(x);
  const float b = flush(y);
  const double exact = static_cast<double>(a) * static_cast<double>(b);
  if (!std::isfinite(exact) || exact == 0.0) return a * b;
  // 24 significant bits with unbounded exponent.
  int exponent = 0;
  const double mantissa = std::nearbyint(std::ldexp(std::frexp(exact, &exponent), 24));
  const double rounded = std::ldexp(mantissa, exponent - 24);
  if (std::abs(rounded) < 0x1p-126) return std::copysign(0.0F, static_cast<float>(exact));
  return static_cast<float>(rounded);
}

float reciprocal(float x, MathMode math) { return encode_scale_from_decode(x, math); }

uint8_t model_e2m1(float x) {
  if (std::isnan(x)) return 0x7;
  const double magnitude = std::min<double>(std::abs(static_cast<double>(x)), 6.0);
  return static_cast<uint8_t>(nearest(kE2M1, magnitude) | (std::signbit(x) ? 8 : 0));
}

uint8_t model_e4m3(float x) {
  static const std::array<double, 127> kMagnitudes = e4m3_magnitudes();
  if (std::isnan(x)) return 0x7F;
  const double magnitude = std::min<double>(std::abs(static_cast<double>(x)), 448.0);
  return static_cast<uint8_t>(nearest(kMagnitudes, magnitude) | (std::signbit(x) ? 0x80 : 0));
}

float model_e4m3_value(uint8_t code) {
  static const std::array<double, 127> kMagnitudes = e4m3_magnitudes();
  if ((code & 0x7F) == 0x7F) return std::numeric_limits<float>::quiet_NaN();
  const auto value = static_cast<float>(kMagnitudes[code & 0x7FU]);
  return (code & 0x80) != 0 ? -value : value;
}

ModelBlock model_nvfp4(const std::vector<float>& x, float g, MathMode math) {
  const bool is_exact = math == MathMode::kExact;
  const float a = largest_magnitude(x);
  const float sixth = 1.0F / 6.0F;
  const float scale =
      is_exact ? (a != 0.0F ? a * (g * sixth) : 0.0F) : multiply(g, multiply(a, sixth, math), math);
  ModelBlock block{.scale = model_e4m3(scale), .codes = {}};
  const float product = multiply(model_e4m3_value(block.scale), reciprocal(g, math), math);
  float m = reciprocal(product, math);
  if (is_exact && !(m <= kMax)) m = kMax;
  if ((is_exact ? a : flush(a)) == 0.0F) m = 0.0F;
  for (const float value : x) block.codes.push_back(model_e2m1(multiply(value, m, math)));
  return block;
}

ModelBlock model_four_over_six(const std::vector<float>& x, float g, const FourOverSix& options) {
  const float a = largest_magnitude(x);
  if (a == 0.0F) return {.scale = 0, .codes = std::vector<uint8_t>(x.size(), 0)};
  const float d = 1.0F / g;
  ModelBlock best;
  float best_error = 0.0F;
  for (const float factor : {1.0F, 1.5F}) {
    ModelBlock block{.scale = model_e4m3(a / 6.0F * g * factor), .codes = {}};
    const float scale = model_e4m3_value(block.scale);
    const float m = std::fmin(1.0F / (scale * d), kMax);
    float error = 0.0F;
    for (const float value : x) {
      block.codes.push_back(model_e2m1(value * m));
      const uint8_t code = block.codes.back();
      const auto magnitude = static_cast<float>(kE2M1[code & 0x7U]);
      const float scaled = (code & 8) != 0 ? -magnitude * scale : magnitude * scale;
      // Volatile: one rounding per operation whatever the compiler would like to contract.
      volatile float product = options.error_math == FourOverSixMath::kStrict ? scaled * d : scaled;
      volatile float target = options.error_math == FourOverSixMath::kStrict ? value : value * g;
      volatile float e = product - target;
      volatile float square = e * e;
      error = error + (options.error == FourOverSixError::kMae ? std::abs(e) : square);
    }
    if (factor == 1.0F || error < best_error) {
      best = block;
      best_error = error;
    }
  }
  return best;
}

ModelBlock model_mx(const std::vector<float>& x, bool is_fp4, MathMode math) {
  const float largest = is_fp4 ? 6.0F : 448.0F;
  const float a = largest_magnitude(x);
  const float scaled = math == MathMode::kExact ? a / largest : multiply(a, 1.0F / largest, math);
  // The least byte whose power of two is not below.
  int byte = 0;
  while (std::ldexp(1.0, byte - 127) < static_cast<double>(scaled)) ++byte;
  const bool is_flushed = math == MathMode::kFast && (byte == 0 || byte == 254);
  const float m = is_flushed ? 0.0F : static_cast<float>(std::ldexp(1.0, 127 - byte));
  ModelBlock block{.scale = static_cast<uint8_t>(byte), .codes = {}};
  for (const float value : x) {
    const float product = multiply(value, m, math);
    block.codes.push_back(is_fp4 ? model_e2m1(product) : model_e4m3(product));
  }
  return block;
}

float model_silu_mul(float gate, float up, MathMode math) {
  const float e = model_exp(-gate);
  if (math == MathMode::kExact) {
    const float sigmoid = gate / (1.0F + e);
    return sigmoid * up;
  }
  const float sum = 1.0F + flush(e);
  return multiply(multiply(gate, reciprocal(sum, math), math), up, math);
}

float model_sum_of_squares(const std::vector<float>& h) {
  std::vector<float> leaves;
  for (size_t first = 0; first < h.size(); first += 8) {
    float leaf = 0.0F;
    for (size_t i = first; i < std::min(first + 8, h.size()); ++i) {
      leaf = std::fma(h[i], h[i], leaf);
    }
    leaves.push_back(leaf);
  }
  size_t padded = 1;
  while (padded < leaves.size()) padded *= 2;
  return sum_of_leaves(leaves, 0, padded);
}

float model_reciprocal_rms(const std::vector<float>& h, float eps) {
  const float mean = model_sum_of_squares(h) / static_cast<float>(h.size());
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(mean + eps)));
}

}  // namespace narrowfloat::testing
