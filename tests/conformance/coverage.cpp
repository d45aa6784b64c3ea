// See coverage.h.
#include "conformance/coverage.h"

#include <iostream>

#include <fmt/format.h>

namespace narrowfloat::testing {
namespace {

bool is_gpu_test() { return device_under_test().type == DeviceType::kCuda; }

}  // namespace

bool is_for_device(std::string_view implementation) {
  return implementation.starts_with(device_prefix());
}

void Coverage::ran(std::string_view implementation) {
  ++runs_[std::string(implementation)];
  is_taken_ = true;
}

void Coverage::refused(std::string_view implementation, std::string_view message) {
  const std::string line = fmt::format("\n  {}: ", implementation);
  const size_t at = message.find(line);
  if (at == std::string_view::npos) {
    ++refusals_[fmt::format("{}: {}", implementation, message)];
    return;
  }
  const std::string_view reason = message.substr(at + line.size());
  ++refusals_[fmt::format("{}: {}", implementation, reason.substr(0, reason.find('\n')))];
}

void Coverage::end_case(bool is_required, std::string_view note) {
  ++cases_;
  if (!is_taken_) {
    ++untaken_;
    EXPECT_FALSE(is_required) << "no implementation takes the case\n" << note << summary();
  }
  is_taken_ = false;
}

std::string Coverage::summary() const {
  std::string text;
  for (const auto& [name, count] : runs_) text += fmt::format("\n    {} ran {} times", name, count);
  for (const auto& [reason, count] : refusals_) {
    text += fmt::format("\n    refused {} times by {}", count, reason);
  }
  return text;
}

void Coverage::report(std::string_view test_name) const {
  EXPECT_FALSE(cases_ > 0 && runs_.empty()) << "nothing ran" << summary();
  if (!is_gpu_test()) return;
  std::cout << fmt::format("{}: {} cases, {} taken by no implementation{}\n", test_name, cases_,
                           untaken_, summary());
}

}  // namespace narrowfloat::testing
