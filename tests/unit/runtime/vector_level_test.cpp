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

// A CPU has AVX-512 and no BF16, another one BF16 and no tiles: each level asks for all below it.
TEST(VectorLevel, PresumesTheLevelsBelow) {
  using Level = VectorLevel;
  const VectorFeatures none;
  const VectorFeatures avx2{.avx2 = true};
  const VectorFeatures avx512{.avx2 = true, .avx512 = true};
  const VectorFeatures bf16{.avx2 = true, .avx512 = true, .avx512_bf16 = true};
  const VectorFeatures amx{.avx2 = true, .avx512 = true, .avx512_bf16 = true, .amx_bf16 = true};
  const VectorFeatures int8{
      .avx2 = true, .avx512 = true, .avx512_bf16 = true, .amx_bf16 = true, .amx_int8 = true};
  const VectorFeatures amx_alone{.avx2 = true, .avx512 = true, .amx_bf16 = true, .amx_int8 = true};
  const VectorFeatures no_avx2{.avx512 = true, .avx512_bf16 = true, .amx_bf16 = true};
  struct Case {
    VectorFeatures features;
    int levels;  // So many of the five are there.
  };
  for (const auto& [features, levels] : {Case{none, 0},
                                         {avx2, 1},
                                         {avx512, 2},
                                         {bf16, 3},
                                         {amx, 4},
                                         {int8, 5},
                                         {amx_alone, 2},
                                         {no_avx2, 0}}) {
    for (const Level level :
         {Level::kAvx2, Level::kAvx512, Level::kAvx512Bf16, Level::kAmxBf16, Level::kAmxInt8}) {
      const bool is_there = static_cast<int>(level) < levels;
      EXPECT_EQ(support_of(level, features).ok(), is_there)
          << static_cast<int>(level) << " of " << levels;
    }
  }
}

// Linux gives tiles to any process without alternate signal stacks.
TEST(VectorLevel, TilesAreTakenWhereTheyAre) {
  const bool are_there = cpu_with(kCpu, VectorLevel::kAmxBf16).ok();
  EXPECT_EQ(take_tiles(), are_there);
  EXPECT_EQ(take_tiles(), are_there);
}

TEST(VectorLevel, IsForTheCpu) {
  const Support support = cpu_with({DeviceType::kCuda, 0}, VectorLevel::kAvx2);
  EXPECT_FALSE(support.ok());
  EXPECT_EQ(support.reason(), "runs on the CPU only");
}

}  // namespace
}  // namespace narrowfloat
