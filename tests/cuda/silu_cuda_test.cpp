// SiLU on the GPU against the CPU's bits: all gates of both 16-bit types, in both modes, each with
// ordinary and with special values of up.
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "cuda/gpu_test.h"
#include "cuda/silu_kernels.h"
#include "formats/float16.h"
#include "formats/silu.h"
#include "support/device_buffer.h"
#include "support/random.h"

namespace narrowfloat::testing {
namespace {

constexpr uint32_t kGates = 65536;

float widen(DType half, uint16_t bits) {
  return half == DType::kBF16 ? bf16_to_float(bits) : f16_to_float(bits);
}
uint16_t narrow(DType half, float value) {
  return half == DType::kBF16 ? float_to_bf16(value) : float_to_f16(value);
}

// Zeros, the least and the largest numbers, infinity and NaN of both signs, and random bits.
std::vector<uint16_t> ups(DType half) {
  const uint16_t infinity = half == DType::kBF16 ? 0x7F80 : 0x7C00;
  const auto largest = static_cast<uint16_t>(infinity - 1);
  const auto signalling = static_cast<uint16_t>(infinity + 1);
  std::vector<uint16_t> values{0, 1, narrow(half, 1.0F), largest, infinity, signalling};
  for (size_t i = 0, count = values.size(); i < count; ++i) {
    values.push_back(static_cast<uint16_t>(values[i] | 0x8000U));
  }
  Random random(1);
  while (values.size() < 32) values.push_back(narrow(half, random.normal()));
  while (values.size() < 40) values.push_back(static_cast<uint16_t>(random.range(0, 65535)));
  return values;
}

uint16_t expected(DType half, MathMode math, uint16_t gate, uint16_t up) {
  const float g = widen(half, gate);
  const float u = widen(half, up);
  return narrow(half,
                math == MathMode::kExact ? silu_mul<ExactMath>(g, u) : silu_mul<FastMath>(g, u));
}

// Words of two neighbouring gates, all of them with every value of up.
struct Pairs {
  std::vector<uint32_t> gates;
  std::vector<uint32_t> ups;
};

Pairs all_pairs(DType half) {
  Pairs pairs;
  const std::vector<uint16_t> values = ups(half);
  for (size_t i = 0; i < values.size(); ++i) {
    const uint32_t word = values[i] | static_cast<uint32_t>(values[(i + 7) % values.size()]) << 16;
    for (uint32_t gate = 0; gate < kGates; gate += 2) {
      pairs.gates.push_back(gate | (gate + 1) << 16);
      pairs.ups.push_back(word);
    }
  }
  return pairs;
}

struct Products {
  std::vector<uint32_t> chosen;
  std::vector<uint32_t> plain;
};

Products run(DType half, MathMode math, const Pairs& pairs) {
  const auto bytes = static_cast<int64_t>(pairs.gates.size() * sizeof(uint32_t));
  const DeviceBuffer gates(bytes);
  const DeviceBuffer ups(bytes);
  const DeviceBuffer chosen(bytes);
  const DeviceBuffer plain(bytes);
  gates.write(pairs.gates.data(), bytes);
  ups.write(pairs.ups.data(), bytes);
  const auto words = [](const DeviceBuffer& buffer) {
    return reinterpret_cast<uint32_t*>(buffer.data());
  };
  const CudaStream stream;
  silu_mul_pairs(half, math,
                 {.gates = words(gates),
                  .ups = words(ups),
                  .products = words(chosen),
                  .plain_products = words(plain),
                  .count = static_cast<int64_t>(pairs.gates.size())},
                 stream.get());
  stream.synchronize();
  Products products{.chosen = std::vector<uint32_t>(pairs.gates.size()),
                    .plain = std::vector<uint32_t>(pairs.gates.size())};
  chosen.read(products.chosen.data(), bytes);
  plain.read(products.plain.data(), bytes);
  return products;
}

class SiluOnTheGpu : public GpuTestWith<std::pair<DType, MathMode>> {};

TEST_P(SiluOnTheGpu, HasTheCpusBitsForAllGates) {
  const auto [half, math] = GetParam();
  const Pairs pairs = all_pairs(half);
  const Products products = run(half, math, pairs);
  int64_t wrong = 0;
  for (size_t i = 0; i < pairs.gates.size() && wrong < 10; ++i) {
    for (const uint32_t shift : {0U, 16U}) {
      const auto gate = static_cast<uint16_t>(pairs.gates[i] >> shift);
      const auto up = static_cast<uint16_t>(pairs.ups[i] >> shift);
      const uint16_t want = expected(half, math, gate, up);
      const auto chosen = static_cast<uint16_t>(products.chosen[i] >> shift);
      const auto plain = static_cast<uint16_t>(products.plain[i] >> shift);
      if (chosen == want && plain == want) continue;
      ++wrong;
      ADD_FAILURE() << fmt::format("gate {:#06x} up {:#06x}: {:#06x} and {:#06x}, expected {:#06x}",
                                   gate, up, chosen, plain, want);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(TypesAndModes, SiluOnTheGpu,
                         ::testing::Values(std::pair{DType::kBF16, MathMode::kExact},
                                           std::pair{DType::kBF16, MathMode::kFast},
                                           std::pair{DType::kF16, MathMode::kExact},
                                           std::pair{DType::kF16, MathMode::kFast}),
                         [](const auto& test) {
                           return fmt::format(
                               "{}_{}", name(test.param.first),
                               test.param.second == MathMode::kExact ? "exact" : "fast");
                         });

}  // namespace
}  // namespace narrowfloat::testing
