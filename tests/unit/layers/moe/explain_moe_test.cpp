// The text of explain_moe() about the stages of a layer.
#include <algorithm>

#include <gtest/gtest.h>

#include "narrowfloat/moe.h"
#include "support/environment.h"
#include "support/expect_error.h"
#include "support/moe_case.h"

namespace narrowfloat::testing {
namespace {

MoeConfig gpt_oss() {
  MoeConfig config;
  config.hidden = 2880;
  config.inter = 2880;
  config.routing.experts = 32;
  config.routing.top_k = 4;
  config.local_experts = 32;
  config.mode = MoeMode::kMxfp4Bf16;
  config.activation = Activation::swiglu_oai(1.702F, 1.0F, 7.0F);
  return config;
}

TEST(ExplainMoe, ListsTheStagesInTheirOrder) {
  const std::vector<Explanation> stages = explain_moe(gpt_oss(), 8);
  std::vector<std::string> names;
  for (const Explanation& stage : stages) {
    names.push_back(stage.op);
    // The first that takes the stage.
    const auto first = std::find_if(stage.candidates.begin(), stage.candidates.end(),
                                    [](const Candidate& candidate) { return candidate.supported; });
    ASSERT_NE(first, stage.candidates.end()) << stage.op;
    EXPECT_EQ(stage.chosen, first->name) << stage.op;
    EXPECT_NE(stage.chosen, "cpu_reference") << stage.op;
    EXPECT_EQ(stage.candidates.back().name, "cpu_reference") << stage.op;
    EXPECT_FALSE(stage.problem.empty()) << stage.op;
  }
  EXPECT_EQ(names, (std::vector<std::string>{"route", "permute", "grouped_gemm", "activation",
                                             "grouped_gemm", "combine"}));
  // The two GEMMs are told apart by their extents.
  EXPECT_NE(stages[2].problem.find("5760"), std::string::npos) << stages[2].problem;
  EXPECT_EQ(stages[4].problem.find("5760"), std::string::npos) << stages[4].problem;
}

std::vector<std::string> stage_names(const std::vector<Explanation>& stages) {
  std::vector<std::string> names;
  for (const Explanation& stage : stages) names.push_back(stage.op);
  return names;
}

// A run with a pinned prologue throws where that refuses, so nothing else routes.
TEST(ExplainMoe, ListsAPinnedPrologueThatRefusesInPlaceOfRouting) {
  if (!build_has_cuda()) GTEST_SKIP() << "this build has no fused prologue";
  const ForcedImplementation forced("route_permute", "sm90_cluster");
  const std::vector<Explanation> stages =
      explain_moe(gpt_oss(), 1 << 16, {.type = DeviceType::kCuda});
  EXPECT_EQ(stage_names(stages),
            (std::vector<std::string>{"route_permute", "grouped_gemm", "activation", "grouped_gemm",
                                      "combine"}));
  EXPECT_EQ(stages.front().chosen, "");
}

TEST(ExplainMoe, ListsTheQuantizationOfRows) {
  MoeConfig config = gpt_oss();
  config.mode = MoeMode::kFp8Block;
  config.hidden = config.inter = 256;
  const std::vector<Explanation> stages = explain_moe(config, 8);
  EXPECT_EQ(stage_names(stages),
            (std::vector<std::string>{"route", "permute", "quantize_activations", "grouped_gemm",
                                      "activation", "grouped_gemm", "combine"}));
  EXPECT_NE(stages[2].problem.find("8x256"), std::string::npos) << stages[2].problem;
  EXPECT_EQ(
      stage_names(explain_moe_reference(config, {.double_quantize_fc1 = true}, 8)),
      (std::vector<std::string>{"route", "permute", "quantize_activations", "grouped_gemm",
                                "quantize_activations", "activation", "grouped_gemm", "combine"}));
}

TEST(ExplainMoe, SaysWhichActivationsHaveValuesPerExpert) {
  MoeConfig config = gpt_oss();
  EXPECT_EQ(explain_moe(config, 8)[3].problem.find("per expert"), std::string::npos);
  const std::vector<float> limits(32, 7.0F);
  config.activation.limit_up = PerExpert(TensorView::contiguous(limits.data(), DType::kF32, {32}));
  const std::string problem = explain_moe(config, 8)[3].problem;
  EXPECT_NE(problem.find("per expert"), std::string::npos) << problem;
}

TEST(ExplainMoe, FollowsWhatIsPinned) {
  const ForcedImplementation forced("activation", "cpu_reference");
  const std::vector<Explanation> stages = explain_moe(gpt_oss(), 8);
  EXPECT_EQ(stages[3].chosen, "cpu_reference");
  EXPECT_NE(stages[2].chosen, "cpu_reference");
}

TEST(ExplainMoe, RefusesWhatPrepareRefuses) {
  MoeConfig config = gpt_oss();
  config.hidden = 2881;
  expect_error(ErrorKind::kInvalidArgument, {"config.hidden", "2881"},
               [&] { (void)explain_moe(config, 1); });
  expect_error(ErrorKind::kInvalidArgument, {"config.hidden", "2881"},
               [&] { (void)explain_moe_reference(config, {}, 1); });
  expect_error(ErrorKind::kInvalidArgument, {"config.hidden", "2881"},
               [&] { (void)plan_moe(config, 1); });
  expect_error(ErrorKind::kInvalidArgument, {"tokens", "-1"},
               [&] { (void)explain_moe(gpt_oss(), -1); });
  expect_error(ErrorKind::kInvalidArgument, {"tokens", "-1"},
               [&] { (void)plan_moe(gpt_oss(), -1); });
}

// Without options a reference is the layer itself.
TEST(ExplainMoe, AReferenceHasTheSumsThatItsOptionsAskFor) {
  const auto activation_of = [](const MoeReferenceOptions& options) {
    return explain_moe_reference(gpt_oss(), options, 8)[3].problem;
  };
  EXPECT_EQ(activation_of({}), explain_moe(gpt_oss(), 8)[3].problem);
  const std::string problem = activation_of({.accumulation = Accumulation::kFp64});
  EXPECT_NE(problem.find("F64"), std::string::npos) << problem;
}

TEST(PlanMoe, HasTheStagesThatAreExplainedAndTheirBuffers) {
  MoeConfig config = gpt_oss();
  config.mode = MoeMode::kFp8Block;
  config.hidden = config.inter = 256;
  const std::vector<Explanation> explained = explain_moe(config, 8);
  const MoePlanInfo plan = plan_moe(config, 8);
  ASSERT_EQ(plan.stages.size(), explained.size());
  for (size_t i = 0; i < explained.size(); ++i) {
    EXPECT_EQ(plan.stages[i].op, explained[i].op);
    EXPECT_EQ(plan.stages[i].implementation, explained[i].chosen);
  }
  using Names = std::vector<std::string>;
  EXPECT_EQ(plan.stages[2].stage, "quantize_input");
  EXPECT_EQ(plan.stages[2].reads, Names{});
  EXPECT_EQ(plan.stages[2].writes, (Names{"input_rows", "first_gemm_scratch"}));
  EXPECT_EQ(plan.stages[4].stage, "activation");
  EXPECT_EQ(plan.stages[4].reads, (Names{"permutation", "gemm_rows"}));
  EXPECT_EQ(plan.stages[4].writes, Names{"intermediate_rows"});
  int64_t end = 0;
  for (const MoePlanInfo::Buffer& buffer : plan.buffers) {
    EXPECT_EQ(buffer.offset % 256, 0) << buffer.name;
    end = std::max(end, buffer.offset + buffer.bytes);
  }
  EXPECT_LE(end, plan.workspace_bytes);
  EXPECT_GT(end + 256, plan.workspace_bytes);
}

class PlanOfEveryMode : public ::testing::TestWithParam<MoeMode> {};
INSTANTIATE_TEST_SUITE_P(PlanMoe, PlanOfEveryMode, ::testing::ValuesIn(every_moe_mode()),
                         mode_test_name);

TEST_P(PlanOfEveryMode, NeedsTheWorkspaceOfTheLayer) {
  const MoeShape shape{.tokens = 1, .hidden = 256, .inter = 128, .experts = 8, .top_k = 2};
  MoeCase layer_case(GetParam(), shape, Activation::swiglu(), 1);
  const MoeLayer layer = layer_case.prepare();
  for (const int64_t tokens : {0, 1, 7, 64, 1000}) {
    EXPECT_EQ(plan_moe(layer_case.config(), tokens).workspace_bytes,
              layer.required_workspace(tokens))
        << tokens;
  }
}

}  // namespace
}  // namespace narrowfloat::testing
