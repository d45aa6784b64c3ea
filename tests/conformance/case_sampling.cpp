// See case_sampling.h.
#include "conformance/case_sampling.h"

#include <array>
#include <cstdlib>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "support/device_copies.h"

namespace narrowfloat::testing {

int64_t num_cases(int64_t base) {
  const char* factor = std::getenv("NARROWFLOAT_CONFORMANCE_CASES");
  if (factor == nullptr) return base;
  const double scaled = static_cast<double>(base) * std::strtod(factor, nullptr);
  return scaled < 1.0 ? 1 : static_cast<int64_t>(scaled);
}

void for_cases(int64_t base, const std::function<void(int64_t)>& body) {
  if (const char* only = std::getenv("NARROWFLOAT_CONFORMANCE_CASE")) {
    return body(std::strtoll(only, nullptr, 10));
  }
  for (int64_t i = 0; i < num_cases(base); ++i) {
    body(i);
    // One repro line says enough; the next thousand would hide it.
    if (::testing::Test::HasFailure()) return;
  }
}

uint64_t case_seed(std::string_view combination, int64_t index) {
  uint64_t hash = kConformanceSeed;
  for (const char c : combination) hash = mix(hash ^ static_cast<uint8_t>(c));
  return mix(hash + static_cast<uint64_t>(index));
}

std::string repro_line(std::string_view op, std::string_view implementation, int64_t index) {
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  return fmt::format(
      "repro: NARROWFLOAT_CONFORMANCE_CASE={} NARROWFLOAT_FORCE={}:{} tests/bin/{} "
      "--gtest_filter={}.{}",
      index, op, implementation,
      device_under_test().type == DeviceType::kCuda ? "conformance_gpu" : "conformance",
      test->test_suite_name(), test->name());
}

int64_t sample_rows(Random& random) {
  if (random.chance(60)) return random.range(0, 20);
  if (random.chance(50)) return random.pick<int64_t>({7, 8, 9, 31, 32, 33, 127, 128, 129, 256});
  return random.range(0, 300);
}

int64_t sample_cols(Random& random, int64_t multiple) {
  int64_t cols = 0;
  const int64_t choice = random.range(0, 99);
  if (choice < 40) {
    cols = random.range(0, 12) * multiple;
  } else if (choice < 75) {
    cols = random.pick<int64_t>({112, 128, 144, 240, 256, 272, 496, 512, 528, 1024});
  } else if (choice < 92) {
    cols = random.pick<int64_t>({1056, 1536, 1568, 2032, 2048, 2064});
  } else {
    cols = random.pick<int64_t>({2880, 4096, 4128});
  }
  return cols / multiple * multiple;
}

}  // namespace narrowfloat::testing
