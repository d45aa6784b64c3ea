// Every implementation of quantize, in every format, layout and math mode, against the oracle: bit
// for bit, in two surroundings that must not matter: on a GPU in both, on the CPU, which has more
// implementations, in turn. A new implementation, format or layout needs no change here.
#include <iostream>
#include <ostream>

#include <gtest/gtest.h>

#include "conformance/case_sampling.h"
#include "conformance/coverage.h"
#include "conformance/quantize_expectations.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kQuantizeCases = 240;

struct QuantizeCombination {
  FormatId format;
  ScaleLayoutId layout;
  MathMode math;
};

std::string quantize_test_name(const QuantizeCombination& combination) {
  return std::string(name(combination.format)) + "_" + std::string(name(combination.layout)) + "_" +
         std::string(name(combination.math));
}

std::vector<QuantizeCombination> quantize_combinations() {
  std::vector<QuantizeCombination> all;
  for (const FormatInfo& info : all_formats()) {
    for (const auto layout : {ScaleLayoutId::kLinear, ScaleLayoutId::kSwizzled128x4,
                              ScaleLayoutId::kSwizzled8x4, ScaleLayoutId::kMnMajor}) {
      if (!info.allows(layout)) continue;
      all.push_back({info.id, layout, MathMode::kExact});
      all.push_back({info.id, layout, MathMode::kFast});
    }
  }
  return all;
}

bool is_cpu_test() { return device_under_test().type == DeviceType::kCpu; }

void PrintTo(const QuantizeCombination& combination, std::ostream* out) {
  *out << quantize_test_name(combination);
}

class QuantizeConformance : public DeviceTest<QuantizeCombination> {
 protected:
  void run_case(int64_t index) {
    const auto [format, layout, math] = GetParam();
    const QuantizeCase test_case = sample_quantize_case(
        format, layout, math, case_seed(quantize_test_name(GetParam()), index));
    const QuantizeOutput oracle = expect_valid(test_case, kOracle, index, {.poison = 0xCC}).value();
    if (HasFailure()) return;
    const bool mistrusted = is_mistrusted(test_case, oracle);
    mistrusted_ += mistrusted ? 1 : 0;
    if (is_typical(test_case)) {
      ++typical_;
      typical_mistrusted_ += mistrusted ? 1 : 0;
    }
    blocks_ += num_blocks(test_case);
    ++cases_;
    int64_t turn = index;
    for (const QuantizeImpl& impl : quantize_impls()) {
      if (!is_for_device(impl.name)) continue;
      ++turn;
      for (const RunStyle style : {RunStyle{.poison = 0xCC, .guard = Guard::kCanary},
                                   RunStyle{.poison = 0xFF, .guard = Guard::kPage}}) {
        if (is_cpu_test() && (style.guard == Guard::kPage) == (turn % 2 == 0)) continue;
        std::string refusal;
        const auto output = expect_valid(test_case, impl.name, index, style, &refusal);
        if (!output) {
          coverage_.refused(impl.name, refusal);
          continue;
        }
        coverage_.ran(impl.name);
        EXPECT_EQ(difference(test_case, oracle, *output), "")
            << repro_line("quantize", impl.name, index) << "\n  " << to_string(test_case)
            << "\n  surroundings: " << static_cast<int>(style.poison);
      }
    }
    // fp32 input is optional on CUDA.
    coverage_.end_case(test_case.dtype != DType::kF32, to_string(test_case));
  }

  // Runs and checks what must hold without an oracle; empty where the implementation refuses.
  static std::optional<QuantizeOutput> expect_valid(const QuantizeCase& test_case,
                                                    std::string_view impl, int64_t index,
                                                    const RunStyle& style,
                                                    std::string* refusal = nullptr) {
    const std::string note = repro_line("quantize", impl, index) + "\n  " + to_string(test_case);
    set_crash_note(note.c_str());
    try {
      auto output = run_quantize(test_case, impl, style, refusal);
      const std::string violation =
          output ? violation_of(test_case, *output, style.poison) : std::string();
      EXPECT_EQ(violation, "") << note;
      return output;
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what() << "\n" << note;
      return QuantizeOutput{};
    }
  }

  int64_t cases_ = 0;
  Coverage coverage_;
  int64_t mistrusted_ = 0;
  int64_t typical_ = 0;
  int64_t typical_mistrusted_ = 0;
  int64_t blocks_ = 0;
};

TEST_P(QuantizeConformance, EveryImplementationGivesTheOraclesBytes) {
  for_cases(kQuantizeCases, [&](int64_t index) { run_case(index); });
  std::cout << quantize_test_name(GetParam()) << ": " << cases_ << " cases, " << blocks_
            << " blocks, " << mistrusted_ << " mistrusted (" << typical_mistrusted_ << " of "
            << typical_ << " typical ones)\n";
  coverage_.report(quantize_test_name(GetParam()));
  // Denormals, sparse data and absurd scales give zeros; typical data must not. (It does where
  // `fast` flushes data of a very small exponent.)
  EXPECT_LE(typical_mistrusted_, 5 + typical_ / 4);
}

INSTANTIATE_TEST_SUITE_P(All, QuantizeConformance, ::testing::ValuesIn(quantize_combinations()),
                         [](const auto& test) { return quantize_test_name(test.param); });

TEST(QuantizeImplementations, EndWithTheOracle) {
  ASSERT_FALSE(quantize_impls().empty());
  EXPECT_EQ(quantize_impls().back().name, kOracle);
}

}  // namespace
}  // namespace narrowfloat::testing
