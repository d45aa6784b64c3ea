// Facts that doctor shows: build, CPU, GPUs, environment.
#include <array>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>

#include "narrowfloat/runtime.h"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/device_code.h"

extern "C" char** environ;

namespace narrowfloat {

std::string_view version() { return NARROWFLOAT_VERSION; }

BuildInfo build_info() {
  BuildInfo info;
  info.version = version();
#if defined(__clang__)
  info.compiler = "clang " __clang_version__;
#else
  info.compiler = "g++ " __VERSION__;
#endif
  info.build_type = NARROWFLOAT_BUILD_TYPE;
#if defined(NARROWFLOAT_CUDA)
  info.cuda_enabled = true;
  std::stringstream architectures{std::string(compiled_architectures())};
  for (std::string name; std::getline(architectures, name, ',');) {
    info.cuda_architectures.push_back(name);
  }
#endif
  return info;
}

namespace {

std::vector<std::string> cpu_features() {
  std::vector<std::string> features;
#if defined(__x86_64__)
  const auto add = [&](const char* feature, int present) {
    if (present != 0) features.emplace_back(feature);
  };
  add("sse4.2", __builtin_cpu_supports("sse4.2"));
  add("avx2", __builtin_cpu_supports("avx2"));
  add("fma", __builtin_cpu_supports("fma"));
  add("avx512f", __builtin_cpu_supports("avx512f"));
  add("avx512bw", __builtin_cpu_supports("avx512bw"));
  add("avx512vl", __builtin_cpu_supports("avx512vl"));
  add("avx512vbmi", __builtin_cpu_supports("avx512vbmi"));
  add("avx512vnni", __builtin_cpu_supports("avx512vnni"));
  add("avx512bf16", __builtin_cpu_supports("avx512bf16"));
#endif
  return features;
}

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    constexpr std::string_view kKey = "model name";
    if (!line.starts_with(kKey)) continue;
    const size_t value = line.find_first_not_of(" \t:", kKey.size());
    return value == std::string::npos ? "unknown" : line.substr(value);
  }
  return "unknown";
}

}  // namespace

CpuInfo cpu_info() {
  return {.model = cpu_model(),
          .logical_cores = static_cast<int>(std::thread::hardware_concurrency()),
          .features = cpu_features()};
}

std::vector<GpuInfo> gpu_info() {
#if defined(NARROWFLOAT_CUDA)
  return list_gpus();
#else
  return {};
#endif
}

std::vector<std::string> environment_settings() {
  std::vector<std::string> settings;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (std::string_view(*entry).starts_with("NARROWFLOAT_")) settings.emplace_back(*entry);
  }
  return settings;
}

}  // namespace narrowfloat
