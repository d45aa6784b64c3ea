// The plan of a run. Its stages read what earlier ones wrote; the workspace never decreases, is
// enough to the byte, and follows docs/moe.md.
#include "layers/moe/plan.h"

#include <algorithm>
#include <cstring>

#include <gtest/gtest.h>

#include "runtime/cuda/kernel_chain.h"
#include "support/expect_error.h"
#include "support/moe_case.h"

namespace narrowfloat::testing {
namespace {

TEST(MoePlan, NeverDecreasesWithTokens) {
  for (const int32_t experts : {1, 3, 8}) {
    const MoeShape shape{.tokens = 1, .hidden = 64, .inter = 32, .experts = experts, .top_k = 1};
    const MoeCase layer_case(MoeMode::kNvfp4PerToken, shape, Activation::swiglu(), 1);
    const MoeLayer layer = layer_case.prepare();
    int64_t before = 0;
    for (int64_t tokens = 0; tokens < 3000; ++tokens) {
      const int64_t bytes = layer.required_workspace(tokens);
      ASSERT_GE(bytes, before) << experts << " experts, " << tokens << " tokens";
      before = bytes;
    }
  }
}

TEST(MoePlan, PartsDoNotOverlapAndAreAligned) {
  MoeExtents extents;
  extents.hidden = 96;
  extents.inter = 32;
  extents.fc1_rows = 64;
  extents.slots = 3;
  extents.local_experts = 5;
  extents.input = RowFormat::kMxfp8;
  extents.intermediate = RowFormat::kMxfp8;
  const MoePlan plan(extents, 7, 8, {.first = 1000, .second = 700});
  const auto offset = [&](MoeBufferId id) { return plan.buffer(id).offset; };
  // 21 slots of 5 experts with tiles of 8: at worst 5 + (21 - 5) / 8 = 7 tiles, 56 rows.
  EXPECT_EQ(plan.permutation().max_rows, 56);
  EXPECT_EQ(offset(MoeBufferId::kIds), 0);
  EXPECT_EQ(offset(MoeBufferId::kWeights), 256);
  EXPECT_EQ(offset(MoeBufferId::kPermutation), 512);
  EXPECT_EQ(offset(MoeBufferId::kCounters), 512 + (plan.permutation().bytes + 255) / 256 * 256);
  EXPECT_EQ(offset(MoeBufferId::kInputRows), offset(MoeBufferId::kCounters) + 256);
  // 7 x 96 codes in 768 bytes, 7 x 3 scales in 256.
  EXPECT_EQ(offset(MoeBufferId::kGemmRows), offset(MoeBufferId::kInputRows) + 768 + 256);
  // 56 rows: 64 fp32 of FC1 beat 96 bf16 of FC2.
  EXPECT_EQ(offset(MoeBufferId::kIntermediateRows), offset(MoeBufferId::kGemmRows) + 56 * 64 * 4);
  EXPECT_EQ(offset(MoeBufferId::kFc1Rows), offset(MoeBufferId::kIntermediateRows) + 56 * 32 + 256);
  EXPECT_EQ(offset(MoeBufferId::kFirstGemmScratch), offset(MoeBufferId::kFc1Rows));
  EXPECT_EQ(plan.workspace_bytes(), offset(MoeBufferId::kFirstGemmScratch) + 1024);
}

// The first GEMM writes into the scratch of the second one while it reads its own.
TEST(MoePlan, ScratchOfTheGemmsLiesApartWithAFusedActivation) {
  MoeExtents extents;
  extents.hidden = 96;
  extents.inter = 32;
  extents.fc1_rows = 64;
  extents.slots = 3;
  extents.local_experts = 5;
  for (const bool is_fused : {false, true}) {
    extents.fuses_activation = is_fused;
    const MoePlan plan(extents, 7, 8, {.first = 300, .second = 700});
    const MoeBuffer& first = plan.buffer(MoeBufferId::kFirstGemmScratch);
    const MoeBuffer& second = plan.buffer(MoeBufferId::kSecondGemmScratch);
    EXPECT_EQ(second.offset, first.offset + (is_fused ? 512 : 0));
    EXPECT_EQ(first.bytes, is_fused ? 300 : 700);
    EXPECT_EQ(second.bytes, 700);
    EXPECT_EQ(plan.workspace_bytes(), second.offset + 768);
  }
}

// Calls visit(plan, facts) for every plan that a layer can have.
template <typename Visit>
void for_every_plan(const Visit& visit) {
  for (unsigned bits = 0; bits < 64; ++bits) {
    const auto bit = [&](unsigned index) { return (bits >> index & 1U) != 0; };
    MoeExtents extents;
    extents.hidden = extents.inter = 128;
    extents.fc1_rows = 256;
    extents.slots = 2;
    extents.local_experts = 4;
    extents.fuses_activation = bit(0);
    extents.double_quantize_fc1 = bit(1);
    extents.weight_on_input = bit(2);
    extents.input_per_expert = bit(3);
    const MoeCallFacts facts{.quantizes_input = bit(4), .joins_routing = bit(5)};
    if (extents.fuses_activation && extents.double_quantize_fc1) continue;
    for (const RowFormat rows :
         {RowFormat::kBf16, RowFormat::kFp8Group, RowFormat::kNvfp4PerToken}) {
      if (facts.quantizes_input && rows == RowFormat::kBf16) continue;
      extents.input = extents.intermediate = rows;
      MoePlan plan(extents, 9, 8, {.first = 300, .second = 700});
      plan.list_stages(facts);
      SCOPED_TRACE(std::to_string(bits) + " " + std::string(name(rows)));
      visit(plan, facts);
    }
  }
}

TEST(MoePlan, StagesReadWhatEarlierOnesWrote) {
  for_every_plan([](const MoePlan& plan, const MoeCallFacts& facts) {
    // A GEMM may write its own scratch before it reads it.
    MoeBufferSet written =
        buffer_set({MoeBufferId::kFirstGemmScratch, MoeBufferId::kSecondGemmScratch});
    for (const MoePlanStage& stage : plan.stages()) {
      EXPECT_EQ(stage.reads & ~written, 0U) << name(stage.kind);
      written |= stage.writes;
    }
    EXPECT_EQ(has(written, MoeBufferId::kInputRows), facts.quantizes_input);
  });
}

TEST(MoePlan, StagesAreInTheOrderOfThePublicOnes) {
  for_every_plan([](const MoePlan& plan, const MoeCallFacts& facts) {
    std::vector<MoePlanStageKind> kinds;
    for (const MoePlanStage& stage : plan.stages()) kinds.push_back(stage.kind);
    EXPECT_TRUE(std::ranges::is_sorted(kinds));
    EXPECT_EQ(std::ranges::adjacent_find(kinds), kinds.end());
    EXPECT_TRUE(std::ranges::is_sorted(plan.stages(), {}, &MoePlanStage::first));
    EXPECT_EQ(kinds.front() == MoePlanStageKind::kRoutePermute, facts.joins_routing);
    for (const MoePlanStageKind always :
         {MoePlanStageKind::kFirstGemm, MoePlanStageKind::kSecondGemm,
          MoePlanStageKind::kCombine}) {
      EXPECT_EQ(std::ranges::count(kinds, always), 1) << name(always);
    }
    const bool is_apart = std::ranges::count(kinds, MoePlanStageKind::kActivation) == 1;
    EXPECT_NE(is_apart, plan.fuses_activation());
  });
}

// The second GEMM reads its tiles before its wait. For the first one they are complete only where
// the input is quantized in between.
TEST(MoePlan, ThePermutationIsCompleteBeforeTheSecondGemm) {
  for_every_plan([](const MoePlan& plan, const MoeCallFacts& /*facts*/) {
    const MoeBufferSet permutation = buffer_set({MoeBufferId::kPermutation});
    KernelChain chain;
    MoePlanStageKind before = MoePlanStageKind::kRoute;
    for (const MoePlanStage& stage : plan.stages()) {
      if (stage.kind == MoePlanStageKind::kFirstGemm) {
        EXPECT_EQ(chain.is_complete(permutation), before == MoePlanStageKind::kQuantizeInput);
      }
      if (stage.kind == MoePlanStageKind::kSecondGemm) {
        EXPECT_TRUE(chain.is_complete(permutation));
      }
      chain.append(stage.writes);
      before = stage.kind;
    }
  });
}

TEST(MoePlan, ExactlyTheRequiredBytesAreEnoughAndOneLessIsRefused) {
  const MoeShape shape{.tokens = 33, .hidden = 160, .inter = 96, .experts = 4, .top_k = 2};
  MoeCase layer_case(MoeMode::kMxfp4Mxfp8, shape, Activation::swiglu(), 2);
  const MoeLayer layer = layer_case.prepare();
  const int64_t bytes = layer.required_workspace(33);
  ASSERT_EQ(bytes % 256, 0);
  // The page after the workspace cannot be touched, and pages are multiples of 256.
  const GuardedBuffer workspace(bytes, {.poison = 0xFF, .guard = Guard::kPage});
  std::vector<uint16_t> out(33 * 160);
  MoeOutputs outputs;
  outputs.out = TensorView::contiguous(out.data(), DType::kBF16, {33, 160});
  const auto run = [&](int64_t size) {
    layer.run(layer_case.inputs(), layer_case.routing(), outputs,
              TensorView::contiguous(workspace.data(), DType::kU8, {size}));
  };
  run(bytes);
  const MoeResult expected = layer_case.run(layer);
  EXPECT_EQ(std::memcmp(out.data(), expected.out.data(), expected.out.size()), 0);
  expect_error(ErrorKind::kInvalidArgument,
               {"workspace", "33 tokens", std::to_string(bytes), std::to_string(bytes - 1)},
               [&] { run(bytes - 1); });
}

TEST(MoePlan, MustBeAligned) {
  const MoeShape shape{.tokens = 2, .hidden = 64, .inter = 32, .experts = 4, .top_k = 2};
  MoeCase layer_case(MoeMode::kBf16, shape, Activation::swiglu(), 3);
  const MoeLayer layer = layer_case.prepare();
  const GuardedBuffer workspace(layer.required_workspace(2) + 16, {.misalignment = 16});
  std::vector<uint16_t> out(2 * 64, 0x1234);
  MoeOutputs outputs;
  outputs.out = TensorView::contiguous(out.data(), DType::kBF16, {2, 64});
  expect_error(ErrorKind::kInvalidArgument, {"workspace", "256"}, [&] {
    layer.run(layer_case.inputs(), layer_case.routing(), outputs,
              TensorView::contiguous(workspace.data(), DType::kU8, {layer.required_workspace(2)}));
  });
  EXPECT_EQ(out, std::vector<uint16_t>(2 * 64, 0x1234));
}

}  // namespace
}  // namespace narrowfloat::testing
