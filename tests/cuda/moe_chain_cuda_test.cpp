// Whole layers whose kernels have the attribute of programmatic launch give the bits of launches
// without it, close to those of the CPU. On the emulator a kernel of such a run fails if a CTA
// triggers the next launch or ends before its wait, which is what runtime/cuda/kernel_chain.h
// counts on.
#include <string>

#include <gtest/gtest.h>

#include "cuda/gpu_test.h"
#include "support/gpu_moe.h"
#include "support/moe_batch.h"
#include "support/moe_stages.h"

namespace narrowfloat::testing {
namespace {

void expect_near_the_cpu(const MoeCase& layer_case, const MoeResult& result) {
  const MoeResult reference = fp64_reference(layer_case);
  EXPECT_EQ(result.topk_ids, reference.topk_ids);
  EXPECT_EQ(result.slot_to_row, reference.slot_to_row);
  EXPECT_EQ(result.expert_weights, reference.expert_weights);
  const MoeConfig& config = layer_case.config();
  const Distance apart = distance(as_floats(result.out, config.out_dtype),
                                  as_floats(reference.out, config.out_dtype), config.hidden);
  // One code of 128 that flips weighs twice what it does among 512.
  EXPECT_LE(apart.rel, 2 * stage_bounds(config.mode).end_to_end.rel);
}

class MoeChain : public GpuTestWith<MoeMode> {
 protected:
  static void expect_same_bits(const Activation& activation, int64_t tokens) {
    const MoeShape shape{.tokens = tokens, .hidden = 128, .inter = 128, .experts = 4, .top_k = 2};
    MoeCase layer_case(GetParam(), shape, activation, 61);
    layer_case.add_biases();
    const MoeLayer layer = prepare_on_gpu(layer_case);
    const MoeResult expected = run_on_gpu(layer, layer_case);
    const MoeResult chained =
        run_on_gpu(layer, layer_case, {.poison = 0x5A, .programmatic_launch = true});
    EXPECT_TRUE(chained == expected) << tokens << " tokens";
    expect_near_the_cpu(layer_case, chained);
  }
};
INSTANTIATE_TEST_SUITE_P(Moe, MoeChain, ::testing::ValuesIn(every_gpu_moe_mode()), mode_test_name);

// Up to 64 tokens one kernel routes, permutes and quantizes.
TEST_P(MoeChain, FewTokensGiveTheBitsOfLaunchesWithoutTheAttribute) {
  expect_same_bits(Activation::swiglu(), 3);
}

TEST_P(MoeChain, ManyTokensGiveTheBitsOfLaunchesWithoutTheAttribute) {
  expect_same_bits(Activation::swiglu(), 70);
}

// The first GEMM does SwiGLU, and no other activation.
TEST_P(MoeChain, AnActivationOfItsOwnGivesTheBitsOfLaunchesWithoutTheAttribute) {
  expect_same_bits({.kind = ActivationKind::kGegluTanh}, 3);
}

}  // namespace
}  // namespace narrowfloat::testing
