// explain(): every operation, without data, through the public API.
#include <algorithm>

#include <gtest/gtest.h>

#include "forced.h"
#include "narrowfloat/error.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat {
namespace {

TEST(Explain, KnowsTheOperationsOfMatrices) {
  EXPECT_EQ(operations(),
            (std::vector<std::string_view>{"quantize", "dequantize", "relayout", "amax", "shuffle",
                                           "pack_bits", "group_quantize", "kv_quantize",
                                           "kv_dequantize", "kv_reorder", "invert_scales"}));
}

// Then one request says what there is to say of it.
TEST(Explain, KnowsWhichOperationsHaveFormats) {
  for (const std::string_view op : operations()) {
    const bool expected =
        op == "quantize" || op == "dequantize" || op == "relayout" || op == "amax";
    EXPECT_EQ(has_formats(op), expected) << op;
    if (expected) continue;
    const Explanation one = explain(op, {.rows = 32});
    for (const FormatInfo& info : all_formats()) {
      const Explanation other = explain(op, {.format = info.id, .rows = 32});
      EXPECT_EQ(other.problem, one.problem) << op << " " << info.name;
      EXPECT_EQ(other.chosen, one.chosen) << op << " " << info.name;
    }
  }
  EXPECT_THROW((void)has_formats("gemm"), Error);
}

TEST(Explain, RefusesShapesThatOverflow) {
  constexpr int64_t kHuge = int64_t{1} << 31;
  for (const std::string_view op : operations()) {
    EXPECT_THROW((void)explain(op, {.batch = kHuge, .rows = kHuge, .cols = kHuge}), Error) << op;
    EXPECT_THROW((void)explain(op, {.batch = -1, .rows = 32}), Error) << op;
  }
  EXPECT_THROW((void)explain("shuffle", {.rows = 0, .cols = INT64_MAX}), Error);
}

TEST(Explain, ChoosesAnImplementationForEveryOperationAndFormatOnTheCpu) {
  for (const std::string_view op : operations()) {
    for (const FormatInfo& info : all_formats()) {
      const Explanation explanation = explain(op, {.format = info.id, .rows = 32, .cols = 128});
      EXPECT_EQ(explanation.op, op);
      EXPECT_FALSE(explanation.problem.empty());
      EXPECT_FALSE(explanation.chosen.empty()) << op << " " << info.name;
      // The oracle is asked last and takes everything.
      ASSERT_FALSE(explanation.candidates.empty());
      EXPECT_EQ(explanation.candidates.back().name, "cpu_reference");
      EXPECT_TRUE(explanation.candidates.back().supported) << op << " " << info.name;
      const auto chosen = std::find_if(
          explanation.candidates.begin(), explanation.candidates.end(),
          [&](const Candidate& candidate) { return candidate.name == explanation.chosen; });
      ASSERT_NE(chosen, explanation.candidates.end());
      EXPECT_TRUE(chosen->supported && chosen->reason.empty());
      for (auto it = explanation.candidates.begin(); it != chosen; ++it) {
        EXPECT_FALSE(it->supported) << it->name << " comes first";
        EXPECT_FALSE(it->reason.empty()) << it->name;
      }
    }
  }
}

TEST(Explain, ChoosesNothingForAGpuWithoutGpuImplementations) {
  if (build_info().cuda_enabled) GTEST_SKIP() << "this build has GPU implementations";
  for (const std::string_view op : operations()) {
    const Explanation explanation = explain(op, {.rows = 32, .device = {DeviceType::kCuda, 0}});
    EXPECT_EQ(explanation.chosen, "") << op;
    for (const Candidate& candidate : explanation.candidates) {
      EXPECT_EQ(candidate.reason, "runs on the CPU only") << op << " " << candidate.name;
    }
  }
}

TEST(Explain, ShowsThePinnedImplementation) {
  const Forced forced("quantize:cpu_reference,amax:cpu_reference");
  EXPECT_EQ(explain("quantize", {}).chosen, "cpu_reference");
  EXPECT_EQ(explain("amax", {}).chosen, "cpu_reference");
  EXPECT_NE(explain("dequantize", {}).chosen, "cpu_reference");
}

TEST(Explain, NamesTheProblem) {
  const ExplainRequest request{.format = FormatId::kMxfp8,
                               .scale_layout = ScaleLayoutId::kSwizzled8x4,
                               .math = MathMode::kFast,
                               .dtype = DType::kF16,
                               .batch = 2,
                               .rows = 3,
                               .cols = 96};
  for (const std::string_view op : {"quantize", "dequantize"}) {
    const std::string problem = explain(op, request).problem;
    for (const std::string_view part : {"mxfp8", "swizzled_8x4", "F16", "2x3x96", "cpu"}) {
      EXPECT_NE(problem.find(part), std::string::npos) << op << ": " << problem;
    }
  }
  EXPECT_NE(explain("relayout", request).problem.find("2x3x3 linear -> swizzled_8x4"),
            std::string::npos);
  EXPECT_NE(explain("amax", request).problem.find("6x96"), std::string::npos);
}

TEST(Explain, RefusesUnknownOperationsAndImpossibleShapes) {
  try {
    (void)explain("gemm", {});
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(
        error.what(),
        "operation: expected one of quantize, dequantize, relayout, amax, shuffle, "
        "pack_bits, group_quantize, kv_quantize, kv_dequantize, kv_reorder, invert_scales, "
        "got \"gemm\"");
  }
  EXPECT_THROW((void)explain("quantize", {.cols = 24}), Error);
  EXPECT_THROW((void)explain("dequantize", {.rows = -1}), Error);
  EXPECT_THROW((void)explain("shuffle", {.rows = 33}), Error);
  EXPECT_THROW((void)explain("pack_bits", {.rows = -1}), Error);
  EXPECT_THROW((void)explain("invert_scales", {.rows = -1}), Error);
  EXPECT_THROW((void)explain("group_quantize", {.cols = 96}), Error);
  EXPECT_THROW((void)explain("kv_quantize", {.cols = 24}), Error);
  EXPECT_THROW((void)explain("kv_quantize", {.dtype = DType::kF32}), Error);
  EXPECT_THROW((void)explain("kv_dequantize", {.cols = 24}), Error);
  EXPECT_THROW((void)explain("kv_reorder", {.rows = 2}), Error);
  EXPECT_THROW((void)explain("relayout", {.scale_layout = ScaleLayoutId::kMnMajor}), Error);
}

}  // namespace
}  // namespace narrowfloat
