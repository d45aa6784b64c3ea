// The device that a conformance executable is about, and what ran on it: implementations may refuse
// problems, but what nobody takes must be seen. Fixtures derive from DeviceTest.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include <gtest/gtest.h>

#include "support/device_copies.h"

namespace narrowfloat::testing {

// Skips where the device is missing.
template <typename Param>
class DeviceTest : public ::testing::TestWithParam<Param> {
 protected:
  void SetUp() override {
    if (const std::string reason = device_missing(); !reason.empty()) GTEST_SKIP() << reason;
  }
};

// Whether an implementation is meant for the device under test, by its name's prefix. The others,
// the oracle in a GPU test among them, run on the host.
bool is_for_device(std::string_view implementation);

// Counts runs and refusals of one test on the device under test.
class Coverage {
 public:
  void ran(std::string_view implementation);
  // `message`: the error's text, which has a line "  implementation: reason".
  void refused(std::string_view implementation, std::string_view message);
  // After a case's last implementation. A required case that nobody took is a failure.
  void end_case(bool is_required, std::string_view note);
  // After the last case: something must have run. Prints the counts of a GPU test.
  void report(std::string_view test_name) const;

 private:
  [[nodiscard]] std::string summary() const;

  std::map<std::string, int64_t, std::less<>> runs_;      // Indexed by implementation.
  std::map<std::string, int64_t, std::less<>> refusals_;  // Indexed by implementation and reason.
  bool is_taken_ = false;
  int64_t cases_ = 0;
  int64_t untaken_ = 0;
};

}  // namespace narrowfloat::testing
