// The table of patterns, texts, and the conditions of the implementations.
#include <array>
#include <set>
#include <string>

#include <gtest/gtest.h>

#include "ops/allreduce/allreduce_problem.h"
#include "support/expect_error.h"

namespace narrowfloat::testing {
namespace {

struct PatternFacts {
  AllReducePattern pattern;
  std::string_view name;
  AllReduceQuantization quantization;
  bool stores_norm;
};

TEST(AllReducePatterns, AreThoseOfTheSpecification) {
  using Pattern = AllReducePattern;
  using Quantization = AllReduceQuantization;
  constexpr std::array kFacts{
      PatternFacts{Pattern::kAllReduce, "allreduce", Quantization::kNone, false},
      PatternFacts{Pattern::kResidualRmsNorm, "residual_rmsnorm", Quantization::kNone, true},
      PatternFacts{Pattern::kFp8, "fp8", Quantization::kFp8Tensor, false},
      PatternFacts{Pattern::kNvfp4, "nvfp4", Quantization::kNvfp4, false},
      PatternFacts{Pattern::kNormFp8, "norm_fp8", Quantization::kFp8Tensor, true},
      PatternFacts{Pattern::kNormNvfp4, "norm_nvfp4", Quantization::kNvfp4, true},
      PatternFacts{Pattern::kMoeReduction, "moe_reduction", Quantization::kMxfp8, false},
      PatternFacts{Pattern::kMoeFinalize, "moe_finalize", Quantization::kMxfp8, false},
      PatternFacts{Pattern::kFp8Group, "fp8_group", Quantization::kFp8GroupUe8m0, false},
      PatternFacts{Pattern::kNormFp8Group, "norm_fp8_group", Quantization::kFp8GroupUe8m0, true},
      PatternFacts{Pattern::kFp8Token, "fp8_token", Quantization::kFp8Token, false},
      PatternFacts{Pattern::kNormFp8Token, "norm_fp8_token", Quantization::kFp8Token, true},
      PatternFacts{Pattern::kFp8Block, "fp8_block", Quantization::kFp8Block1x128, false},
      PatternFacts{Pattern::kNormFp8Block, "norm_fp8_block", Quantization::kFp8Block1x128, true},
      PatternFacts{Pattern::kMxfp8, "mxfp8", Quantization::kMxfp8, false},
      PatternFacts{Pattern::kNormMxfp8, "norm_mxfp8", Quantization::kMxfp8, true},
      PatternFacts{Pattern::kMxfp4, "mxfp4", Quantization::kMxfp4, false},
      PatternFacts{Pattern::kNormMxfp4, "norm_mxfp4", Quantization::kMxfp4, true},
      PatternFacts{Pattern::kNvfp4PerToken, "nvfp4_per_token", Quantization::kNvfp4PerToken, false},
      PatternFacts{Pattern::kNormNvfp4PerToken, "norm_nvfp4_per_token",
                   Quantization::kNvfp4PerToken, true}};
  ASSERT_EQ(kFacts.size(), static_cast<size_t>(kNumAllReducePatterns));
  for (size_t i = 0; i < kFacts.size(); ++i) {
    const PatternFacts& facts = kFacts[i];
    EXPECT_EQ(static_cast<size_t>(facts.pattern), i);
    EXPECT_EQ(name(facts.pattern), facts.name);
    // The MoE patterns take the quantization that the problem names.
    EXPECT_EQ(quantization_of({.pattern = facts.pattern, .moe_quantization = Quantization::kMxfp8}),
              facts.quantization);
    EXPECT_EQ(stores_norm(facts.pattern), facts.stores_norm);
    EXPECT_EQ(has_norm(facts.pattern), facts.pattern != Pattern::kAllReduce);
    const bool is_reduction = facts.pattern == Pattern::kMoeReduction;
    const bool is_finalize = facts.pattern == Pattern::kMoeFinalize;
    EXPECT_EQ(is_moe(facts.pattern), is_reduction || is_finalize);
    EXPECT_EQ(source_of(facts.pattern), is_reduction  ? AllReduceSource::kMoeReduction
                                        : is_finalize ? AllReduceSource::kMoeFinalize
                                                      : AllReduceSource::kInput);
  }
}

template <typename Enum>
void expect_distinct_names(int count) {
  std::set<std::string_view> names;
  for (int i = 0; i < count; ++i) names.insert(name(static_cast<Enum>(i)));
  EXPECT_EQ(names.size(), static_cast<size_t>(count));
  EXPECT_THROW(name(static_cast<Enum>(count)), Error);
  EXPECT_THROW(name(static_cast<Enum>(-1)), Error);
}

TEST(AllReduceNames, AreDistinctAndRefuseOtherNumbers) {
  expect_distinct_names<AllReducePattern>(kNumAllReducePatterns);
  expect_distinct_names<AllReduceQuantization>(9);
  expect_distinct_names<AllReduceAlgorithm>(6);
  expect_distinct_names<AllReduceTransport>(7);
}

// Ranks compare problems by this text.
TEST(AllReduceProblemText, DiffersWhereAnyMemberDoes) {
  std::set<std::string> texts;
  const auto add = [&](auto&& change) {
    AllReduceProblem problem{.tokens = 64, .hidden = 7168};
    change(problem);
    EXPECT_TRUE(texts.insert(to_string(problem)).second) << to_string(problem);
  };
  add([](AllReduceProblem&) {});
  add([](AllReduceProblem& p) { p.tokens = 65; });
  add([](AllReduceProblem& p) { p.hidden = 7176; });
  add([](AllReduceProblem& p) { p.element = DType::kF16; });
  add([](AllReduceProblem& p) { p.pattern = AllReducePattern::kFp8; });
  add([](AllReduceProblem& p) { p.moe_quantization = AllReduceQuantization::kMxfp4; });
  add([](AllReduceProblem& p) { p.scale_layout = ScaleLayoutId::kLinear; });
  add([](AllReduceProblem& p) { p.group = 64; });
  add([](AllReduceProblem& p) { p.accumulation = AllReduceAccumulation::kElement; });
  add([](AllReduceProblem& p) { p.exactness = AllReduceExactness::kFast; });
  add([](AllReduceProblem& p) { p.algorithm = AllReduceAlgorithm::kTwoShot; });
  EXPECT_EQ(to_string(AllReduceProblem{.tokens = 64, .hidden = 7168}),
            "allreduce of BF16 64x7168, scales swizzled_128x4, fp32 sums, exact, auto");
}

AllReduceCall call_of(int64_t tokens, int ranks = 4) {
  return {.problem = {.tokens = tokens, .hidden = 8192},
          .ranks = ranks,
          .capacities = {1 << 20, 32 << 20}};
}

TEST(AllReduceConditions, CompareTheMessageWithTheCapacity) {
  EXPECT_TRUE(oneshot_condition(call_of(64)).ok());
  EXPECT_EQ(oneshot_condition(call_of(128)).reason(),
            "message of 2.0 MiB exceeds oneshot_bytes of 1.0 MiB");
  EXPECT_TRUE(twoshot_condition(call_of(2048)).ok());
  EXPECT_EQ(twoshot_condition(call_of(4096)).reason(),
            "message of 64.0 MiB exceeds twoshot_bytes of 32.0 MiB");
  // Sizes that look the same are given in bytes.
  AllReduceCall call = call_of(64);
  call.capacities.oneshot_bytes -= 8;
  EXPECT_EQ(oneshot_condition(call).reason(),
            "message of 1048576 bytes exceeds oneshot_bytes of 1048568 bytes");
  call.capacities.oneshot_bytes = 100;
  call.problem.tokens = 1;
  EXPECT_EQ(oneshot_condition(call).reason(),
            "message of 16.0 KiB exceeds oneshot_bytes of 100 bytes");
}

TEST(AllReduceConditions, LetOneRankTakeAnyMessage) {
  AllReduceCall call = call_of(1'000'000, 1);
  call.has_peer_memory = false;
  EXPECT_TRUE(oneshot_condition(call).ok());
  EXPECT_TRUE(twoshot_condition(call).ok());
}

TEST(AllReduceConditions, NeedPeerMemoryAndTheClassOfElements) {
  AllReduceCall call = call_of(1);
  call.has_peer_memory = false;
  EXPECT_EQ(oneshot_condition(call).reason(), "the workspace has no peer memory");
  call = call_of(1);
  call.workspace_element = DType::kF32;
  EXPECT_EQ(twoshot_condition(call).reason(),
            "the workspace is for F32 elements, the problem has BF16");
  call.problem.element = DType::kF32;
  EXPECT_TRUE(twoshot_condition(call).ok());
  // The 16-bit types share workspaces.
  call.problem.element = DType::kF16;
  call.workspace_element = DType::kBF16;
  EXPECT_TRUE(oneshot_condition(call).ok());
}

TEST(AllReduceCpuImplementations, RunOnTheCpuOnly) {
  AllReduceCall call = call_of(128);
  EXPECT_FALSE(kAllReduceCpuOneShot.supports(call).ok());
  EXPECT_TRUE(kAllReduceCpuTwoShot.supports(call).ok());
  EXPECT_TRUE(kAllReduceCpuReference.supports(call).ok());
  EXPECT_EQ(kAllReduceCpuReference.algorithm, AllReduceAlgorithm::kReference);
  EXPECT_EQ(kAllReduceCpuReference.name, "cpu_reference");
  call.device = {DeviceType::kCuda, 0};
  EXPECT_EQ(kAllReduceCpuTwoShot.supports(call).reason(), "runs on the CPU only");
}

}  // namespace
}  // namespace narrowfloat::testing
