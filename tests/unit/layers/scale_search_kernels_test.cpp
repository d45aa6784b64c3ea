// The kernels of the scale search have the bits of the formulas: codes of E2M1 and E4M3, products
// of codes and factors in fp32, errors in double, in the order of the elements.
#include "layers/x86/scale_search_kernels.h"

#include <array>
#include <cmath>
#include <cstring>
#include <random>

#include <gtest/gtest.h>

#include "formats/minifloat.h"
#include "runtime/vector_level.h"

namespace narrowfloat {
namespace {

template <class Element>
double expected_error(const SearchedBlock& block, float multiplier, float factor) {
  double sum = 0;
  for (int64_t i = 0; i < block.cols; ++i) {
    const float value = Element::decode(Element::encode(block.x[i] * multiplier));
    const double error = static_cast<double>(block.x[i]) - static_cast<double>(value * factor);
    sum += static_cast<double>(block.weights[i]) * error * error;
  }
  return sum;
}

// Elements at ties and next to them, up to ten octaves below the largest code and two above it.
template <class Element>
float element(std::mt19937& random) {
  const auto code = static_cast<uint32_t>(random()) % Element::kMaxCode;
  const float tie = (Element::decode(static_cast<uint8_t>(code)) +
                     Element::decode(static_cast<uint8_t>(code + 1))) /
                    2;
  const float nearby[] = {tie, std::nextafter(tie, 0.0F), std::nextafter(tie, 1e9F), 0.0F};
  const float any =
      std::ldexp(static_cast<float>(random() % (1 << 24)),
                 std::ilogb(Element::kMaxFinite) - 21 - static_cast<int>(random() % 10));
  const float magnitude = random() % 2 == 0 ? nearby[random() % 4] : any;
  return random() % 2 == 0 ? magnitude : -magnitude;
}

template <class Element>
void expect_bits_of_formulas(ScaleSearchKernels::Errors errors_of) {
  std::mt19937 random(3);
  for (int round = 0; round < 4000; ++round) {
    std::array<float, 32> x{};
    std::array<float, 32> weights{};
    // Powers of two leave ties where they are.
    const int exponent = static_cast<int>(random() % 200) - 100;
    for (float& one : x) one = std::ldexp(element<Element>(random), exponent);
    for (float& one : weights) one = std::ldexp(static_cast<float>(random() % 1000), -7);
    std::array<float, kSearchLanes> multipliers{};
    std::array<float, kSearchLanes> factors{};
    for (size_t lane = 0; lane < multipliers.size(); ++lane) {
      const float scale = 1.0F + static_cast<float>(round % 2 == 0 ? 0 : random() % 8) / 8;
      const int shift = static_cast<int>(lane) - 3;
      multipliers[lane] = std::ldexp(1 / scale, shift - exponent);
      factors[lane] = std::ldexp(scale, exponent - shift);
    }
    const SearchedBlock block{x.data(), weights.data(), round % 3 == 0 ? 16 : 32};
    std::array<double, kSearchLanes> errors{};
    errors_of(block, multipliers.data(), factors.data(), errors.data());
    for (size_t lane = 0; lane < errors.size(); ++lane) {
      ASSERT_EQ(errors[lane], expected_error<Element>(block, multipliers[lane], factors[lane]))
          << "round " << round << ", lane " << lane;
    }
  }
}

TEST(ScaleSearchKernels, HaveTheBitsOfTheFormulas) {
  const Support support = cpu_with(Device{}, VectorLevel::kAvx2);
  if (!support.ok()) GTEST_SKIP() << support.reason();
  expect_bits_of_formulas<E2M1>(kScaleSearchKernelsAvx2.of_e2m1);
  expect_bits_of_formulas<E4M3>(kScaleSearchKernelsAvx2.of_e4m3);
}

}  // namespace
}  // namespace narrowfloat
