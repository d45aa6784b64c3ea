// The facts that doctor shows about build, machine and environment.
#include <algorithm>
#include <cstdlib>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include "narrowfloat/runtime.h"

namespace narrowfloat {
namespace {

TEST(Version, IsThreeNumbers) {
  const std::string text(version());
  EXPECT_EQ(text.find_first_not_of("0123456789."), std::string::npos) << text;
  EXPECT_EQ(std::count(text.begin(), text.end(), '.'), 2) << text;
  EXPECT_EQ(text.find(".."), std::string::npos) << text;
  EXPECT_TRUE(text.front() != '.' && text.back() != '.') << text;
}

TEST(BuildInfo, NamesCompilerAndVersion) {
  const BuildInfo info = build_info();
  EXPECT_EQ(info.version, version());
  EXPECT_TRUE(info.compiler.starts_with("g++ ") || info.compiler.starts_with("clang "))
      << info.compiler;
  EXPECT_EQ(info.cuda_enabled, !info.cuda_architectures.empty());
}

TEST(CpuInfo, CountsTheCoresAndKnowsTheModel) {
  const CpuInfo info = cpu_info();
  EXPECT_EQ(info.logical_cores, static_cast<int>(std::thread::hardware_concurrency()));
  EXPECT_FALSE(info.model.empty());
}

TEST(CpuInfo, ListsAFeatureExactlyIfTheProcessorHasIt) {
#if defined(__x86_64__)
  const std::vector<std::string> features = cpu_info().features;
  const auto listed = [&](const char* name) {
    return std::find(features.begin(), features.end(), name) != features.end();
  };
  EXPECT_EQ(listed("avx2"), __builtin_cpu_supports("avx2") != 0);
  EXPECT_EQ(listed("avx512f"), __builtin_cpu_supports("avx512f") != 0);
  EXPECT_EQ(listed("fma"), __builtin_cpu_supports("fma") != 0);
#endif
}

TEST(GpuInfo, IsEmptyInABuildWithoutCuda) {
  if (!build_info().cuda_enabled) {
    EXPECT_TRUE(gpu_info().empty());
  }
}

TEST(EnvironmentSettings, ListOwnVariablesOnly) {
  const auto listed = [](const std::string& setting) {
    const std::vector<std::string> settings = environment_settings();
    return std::find(settings.begin(), settings.end(), setting) != settings.end();
  };
  EXPECT_FALSE(listed("NARROWFLOAT_TEST_SETTING=7"));
  setenv("NARROWFLOAT_TEST_SETTING", "7", 1);
  EXPECT_TRUE(listed("NARROWFLOAT_TEST_SETTING=7"));
  unsetenv("NARROWFLOAT_TEST_SETTING");
  EXPECT_FALSE(listed("NARROWFLOAT_TEST_SETTING=7"));
  for (const std::string& setting : environment_settings()) {
    EXPECT_TRUE(setting.starts_with("NARROWFLOAT_")) << setting;
  }
}

}  // namespace
}  // namespace narrowfloat
