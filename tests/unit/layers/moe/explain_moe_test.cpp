// What explain_moe() says about the stages of a layer.
#include <gtest/gtest.h>

#include "narrowfloat/moe.h"
#include "support/environment.h"
#include "support/expect_error.h"

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
    EXPECT_EQ(stage.chosen, "cpu_baseline") << stage.op;
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

TEST(ExplainMoe, ListsTheCodingOfRows) {
  MoeConfig config = gpt_oss();
  config.mode = MoeMode::kFp8Block;
  config.hidden = config.inter = 256;
  const std::vector<Explanation> stages = explain_moe(config, 8);
  EXPECT_EQ(stage_names(stages),
            (std::vector<std::string>{"route", "permute", "code_rows", "grouped_gemm", "activation",
                                      "grouped_gemm", "combine"}));
  EXPECT_NE(stages[2].problem.find("8x256"), std::string::npos) << stages[2].problem;
  config.double_quantize_fc1 = true;
  EXPECT_EQ(stage_names(explain_moe(config, 8)),
            (std::vector<std::string>{"route", "permute", "code_rows", "grouped_gemm", "code_rows",
                                      "activation", "grouped_gemm", "combine"}));
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
  EXPECT_EQ(stages[2].chosen, "cpu_baseline");
}

TEST(ExplainMoe, RefusesWhatPrepareRefuses) {
  MoeConfig config = gpt_oss();
  config.hidden = 2881;
  expect_error(ErrorKind::kInvalidArgument, {"config.hidden", "2881"},
               [&] { (void)explain_moe(config, 1); });
  expect_error(ErrorKind::kInvalidArgument, {"tokens", "-1"},
               [&] { (void)explain_moe(gpt_oss(), -1); });
}

}  // namespace
}  // namespace narrowfloat::testing
