// The configurations of moe spec 13.1 on a GPU, at all numbers of tokens that it asks for, in the
// modes that it asks for; their shards; every k. The CPU computes a prime number of tokens once:
// the batches consist of them, so that it judges all rows of 4096 tokens.
//
// Widths are 128 columns; with NARROWFLOAT_LARGE those of the specification.
#include <gtest/gtest.h>

#include "cuda/gpu_test.h"
#include "support/gpu_moe.h"
#include "support/moe_batch.h"
#include "support/moe_configurations.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kConfiguredTokens = 131;

std::vector<ConfiguredMode> all_configured_modes() {
  std::vector<ConfiguredMode> result;
  for (size_t i = 0; i < moe_configurations().size(); ++i) {
    const std::vector<MoeMode> every = every_gpu_moe_mode();
    const auto modes = moe_configurations()[i].in_every_mode ? std::span<const MoeMode>(every)
                                                             : configured_modes();
    for (const MoeMode mode : modes) result.emplace_back(i, mode);
  }
  return result;
}

class MoeConfigurationsOnTheGpu : public GpuTestWith<ConfiguredMode> {
 protected:
  static const MoeConfiguration& configuration() {
    return moe_configurations()[std::get<0>(GetParam())];
  }
  static std::unique_ptr<MoeCase> configured_case(int64_t tokens) {
    auto result = make_case(configuration(), std::get<1>(GetParam()), tokens, is_large_run());
    if (configuration().has_odd_extents) result->add_biases();
    return result;
  }
};
INSTANTIATE_TEST_SUITE_P(Moe, MoeConfigurationsOnTheGpu,
                         ::testing::ValuesIn(all_configured_modes()), configured_mode_name);

TEST_P(MoeConfigurationsOnTheGpu, AgreeWithTheCpuAtEveryCount) {
  const auto layer_case = configured_case(kConfiguredTokens);
  const MoeResult oracle = fp64_reference(*layer_case);
  const MoeLayer layer = prepare_on_gpu(*layer_case);
  const std::vector<int64_t> few{0, 1, 65, 4096};
  const std::vector<int64_t> many{0, 1, 2, 7, 8, 63, 64, 65, 127, 128, 4096};
  for (const int64_t tokens : configuration().at_many_counts ? many : few) {
    SCOPED_TRACE(std::to_string(tokens) + " tokens");
    const RepeatedTokens batch(*layer_case, tokens);
    const bool is_long = tokens > 128;
    const MoeResult result =
        run_on_gpu(layer, *layer_case, {.programmatic_launch = is_long || tokens % 2 == 1});
    expect_batch_close(*layer_case, layer, oracle, result);
    if (is_long) {
      EXPECT_TRUE(run_on_gpu(layer, *layer_case).out == result.out);
    }
  }
}

TEST_P(MoeConfigurationsOnTheGpu, ShardsHoldTheirRows) {
  if (configuration().shards.empty()) GTEST_SKIP() << "this configuration is not sharded";
  for (const int64_t tokens : {1, 65}) {
    SCOPED_TRACE(std::to_string(tokens) + " tokens");
    const auto layer_case = configured_case(tokens);
    layer_case->config().token_tile = 8;
    const MoeResult whole = run_on_gpu(prepare_on_gpu(*layer_case), *layer_case);
    for (const MoeShard& shard : configuration().shards) {
      MoeConfig config = layer_case->config();
      config.expert_offset = shard.offset;
      config.local_experts = shard.count;
      const MoeLayer layer = prepare_on_gpu(layer_case->shard(shard.offset, shard.count), config);
      const MoeResult part = run_on_gpu(layer, *layer_case);
      expect_rows_of_shard(part, whole, shard.offset, shard.count);
      EXPECT_EQ(combined_slots(part, config), part.out);
    }
  }
}

class MoeTopKOnTheGpu : public GpuTestWith<MoeMode> {};
INSTANTIATE_TEST_SUITE_P(Moe, MoeTopKOnTheGpu, ::testing::ValuesIn(every_gpu_moe_mode()),
                         mode_test_name);

TEST_P(MoeTopKOnTheGpu, EveryKAgreesWithTheCpu) {
  for (int32_t top_k = 1; top_k <= 8; ++top_k) {
    SCOPED_TRACE("k " + std::to_string(top_k));
    const MoeShape shape{.tokens = 33, .hidden = 256, .inter = 256, .experts = 8, .top_k = top_k};
    MoeCase layer_case(GetParam(), shape, Activation::swiglu(), 41);
    const MoeResult result = run_on_gpu(prepare_on_gpu(layer_case), layer_case);
    expect_close(layer_case, layer_case.config(), fp64_reference(layer_case), result);
    EXPECT_EQ(combined_slots(result, layer_case.config()), result.out);
  }
}

}  // namespace
}  // namespace narrowfloat::testing
