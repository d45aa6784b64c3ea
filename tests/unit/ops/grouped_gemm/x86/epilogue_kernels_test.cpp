// The epilogue in vectors, against its operations on single numbers.
#include "ops/grouped_gemm/x86/epilogue_kernels.h"

#include <array>
#include <cstring>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "base/float_ops.h"
#include "ops/grouped_gemm/gemm_output.h"
#include "runtime/vector_level.h"

namespace narrowfloat {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kRows = 7;
constexpr int64_t kStrips = 3;

// Ordinary numbers; among them infinities, NaN, denormals and numbers in the middle of two bf16.
std::vector<float> numbers(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> result;
  for (int64_t i = 0; i < count; ++i) {
    const auto bits = static_cast<uint32_t>(random());
    switch (random() % 8) {
      case 0:
        result.push_back(bits_float(bits));
        break;
      case 1:
        result.push_back(bits_float((bits & 0x80FF0000U) | 0x3F008000U));
        break;
      case 2:
        result.push_back(bits_float((bits & 0x80000000U) | 0x7F800000U | (bits & 1U) << 3U));
        break;
      case 3:
        result.push_back(bits_float(bits & 0x807FFFFFU));
        break;
      default:
        result.push_back(static_cast<float>(static_cast<int32_t>(bits)) * 0x1p-28F);
    }
  }
  return result;
}

template <typename Output>
void expect_operations(const EpilogueKernels& kernels, DType dtype) {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    const std::vector<float> scales = numbers(kLanes, 4 * seed);
    const std::vector<float> bias = numbers(kLanes, 4 * seed + 1);
    const std::vector<float> sums = numbers(kRows * kStrips * kLanes, 4 * seed + 2);
    const std::vector<float> of_rows = numbers(2 * kRows, 4 * seed + 3);
    std::vector<Output> got(kRows * kStrips * kLanes, Output{5});
    std::vector<Output> expected = got;
    std::array<EpilogueRow, kRows> rows;
    for (int64_t i = 0; i < kRows; ++i) {
      const auto index = static_cast<size_t>(i);
      rows[index] = {.sums = &sums[index * kStrips * kLanes],
                     .weight = of_rows[2 * index],
                     .row_scale = of_rows[2 * index + 1],
                     .output = &got[index * kStrips * kLanes]};
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const int64_t place = i * kStrips * kLanes + lane;
        // The second strip's sums become the third one's outputs.
        const float a = mul_rn(of_rows[2 * index], sums[static_cast<size_t>(place + kLanes)]);
        const float factor = mul_rn(scales[static_cast<size_t>(lane)], of_rows[2 * index + 1]);
        store_result(dtype, add_rn(mul_rn(factor, a), bias[static_cast<size_t>(lane)]),
                     place + 2 * kLanes, expected.data());
      }
    }
    (dtype == DType::kBF16 ? kernels.store_bf16 : kernels.store_fp32)(
        {.scales = scales.data(), .bias = bias.data(), .sums = kLanes, .outputs = 2 * kLanes},
        rows.data(), kRows);
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(std::memcmp(&got[i], &expected[i], sizeof(Output)), 0)
          << "seed " << seed << ", place " << i << ": " << got[i] << " " << expected[i];
    }
  }
}

void expect_operations_at(const EpilogueKernels& kernels, VectorLevel level) {
  if (!cpu_with({DeviceType::kCpu, 0}, level).ok()) GTEST_SKIP() << "the processor lacks the level";
  expect_operations<float>(kernels, DType::kF32);
  expect_operations<uint16_t>(kernels, DType::kBF16);
}

TEST(EpilogueKernels, HaveTheOperationsWithAvx2) {
  expect_operations_at(kEpilogueKernelsAvx2, VectorLevel::kAvx2);
}
TEST(EpilogueKernels, HaveTheOperationsWithAvx512) {
  expect_operations_at(kEpilogueKernelsAvx512, VectorLevel::kAvx512);
}

}  // namespace
}  // namespace narrowfloat
