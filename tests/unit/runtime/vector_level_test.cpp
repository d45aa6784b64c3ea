// Which CPUs and devices the implementations for a level of vector instructions take.
#include "runtime/vector_level.h"

#include <algorithm>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "narrowfloat/runtime.h"

namespace narrowfloat {
namespace {

constexpr Device kCpu{DeviceType::kCpu, 0};

bool lists(const std::vector<std::string>& features, const char* name) {
  return std::find(features.begin(), features.end(), name) != features.end();
}

TEST(VectorLevel, RunsExactlyWhereTheCpuHasItsInstructions) {
  const std::vector<std::string> features = cpu_info().features;
  EXPECT_EQ(cpu_with(kCpu, VectorLevel::kAvx2).ok(),
            lists(features, "avx2") && lists(features, "fma"));
  EXPECT_EQ(cpu_with(kCpu, VectorLevel::kAvx512).ok(),
            lists(features, "avx2") && lists(features, "avx512bw") && lists(features, "avx512vl") &&
                lists(features, "avx512vbmi"));
}

TEST(VectorLevel, IsForTheCpu) {
  const Support support = cpu_with({DeviceType::kCuda, 0}, VectorLevel::kAvx2);
  EXPECT_FALSE(support.ok());
  EXPECT_EQ(support.reason(), "runs on the CPU only");
}

}  // namespace
}  // namespace narrowfloat
