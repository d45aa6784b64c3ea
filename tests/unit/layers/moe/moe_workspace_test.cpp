// The workspace: its size never decreases, is enough to the byte, and follows docs/moe.md.
#include "layers/moe/moe_workspace.h"

#include <cstring>

#include <gtest/gtest.h>

#include "support/expect_error.h"
#include "support/moe_case.h"

namespace narrowfloat::testing {
namespace {

TEST(MoeWorkspace, NeverDecreasesWithTokens) {
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

TEST(MoeWorkspace, PartsDoNotOverlapAndAreAligned) {
  MoeExtents extents;
  extents.hidden = 96;
  extents.inter = 32;
  extents.fc1_rows = 64;
  extents.slots = 3;
  extents.local_experts = 5;
  extents.input = RowFormat::kMxfp8;
  extents.intermediate = RowFormat::kMxfp8;
  const MoeWorkspace plan = moe_workspace(extents, 7, 8, {.first = 1000, .second = 700});
  // 21 slots of 5 experts with tiles of 8: at worst 5 + (21 - 5) / 8 = 7 tiles, 56 rows.
  EXPECT_EQ(plan.permutation_layout.max_rows, 56);
  EXPECT_EQ(plan.ids, 0);
  EXPECT_EQ(plan.weights, 256);
  EXPECT_EQ(plan.permutation, 512);
  EXPECT_EQ(plan.counters, 512 + (plan.permutation_layout.bytes + 255) / 256 * 256);
  EXPECT_EQ(plan.input_rows, plan.counters + 256);
  // 7 x 96 codes in 768 bytes, 7 x 3 scales in 256.
  EXPECT_EQ(plan.gemm_rows, plan.input_rows + 768 + 256);
  // 56 rows: 64 fp32 of FC1 beat 96 bf16 of FC2.
  EXPECT_EQ(plan.intermediate_rows, plan.gemm_rows + 56 * 64 * 4);
  EXPECT_EQ(plan.fc1_coded_rows, plan.intermediate_rows + 56 * 32 + 256);
  EXPECT_EQ(plan.gemm, plan.fc1_coded_rows);
  EXPECT_EQ(plan.total, plan.gemm + 1024);
}

// The first GEMM writes into the second one's while it reads its own.
TEST(MoeWorkspace, GemmsLieApartWithAFusedActivation) {
  MoeExtents extents;
  extents.hidden = 96;
  extents.inter = 32;
  extents.fc1_rows = 64;
  extents.slots = 3;
  extents.local_experts = 5;
  for (const bool is_fused : {false, true}) {
    extents.fuses_activation = is_fused;
    const MoeWorkspace plan = moe_workspace(extents, 7, 8, {.first = 300, .second = 700});
    EXPECT_EQ(plan.second_gemm, plan.gemm + (is_fused ? 512 : 0));
    EXPECT_EQ(plan.gemm_bytes, is_fused ? 300 : 700);
    EXPECT_EQ(plan.second_gemm_bytes, 700);
    EXPECT_EQ(plan.total, plan.second_gemm + 768);
  }
}

TEST(MoeWorkspace, ExactlyTheRequiredBytesAreEnoughAndOneLessIsRefused) {
  const MoeShape shape{.tokens = 33, .hidden = 160, .inter = 96, .experts = 4, .top_k = 2};
  MoeCase layer_case(MoeMode::kMxfp4Mxfp8, shape, Activation::swiglu(), 2);
  const MoeLayer layer = layer_case.prepare();
  const int64_t bytes = layer.required_workspace(33);
  ASSERT_EQ(bytes % 256, 0);
  // The page behind the workspace cannot be touched, and pages are multiples of 256.
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

TEST(MoeWorkspace, MustBeAligned) {
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
