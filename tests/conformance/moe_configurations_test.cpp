// The configurations of moe spec 13.1 on the CPU: whole layers against their shards and against
// the reference, at widths that a test can afford (MoeWide keeps gpt-oss's 2880 columns: 22.5
// groups of 128).
#include "support/moe_configurations.h"

#include <cstring>

#include <gtest/gtest.h>

#include "support/environment.h"
#include "support/moe_batch.h"

namespace narrowfloat::testing {
namespace {

void expect_shards_hold_its_rows(MoeCase& layer_case, const MoeResult& whole,
                                 const std::vector<MoeShard>& shards) {
  for (const MoeShard& shard : shards) {
    MoeConfig config = layer_case.config();
    config.expert_offset = shard.offset;
    config.local_experts = shard.count;
    const MoeResult part =
        layer_case.run(MoeLayer::prepare(layer_case.shard(shard.offset, shard.count), config));
    expect_rows_of_shard(part, whole, shard.offset, shard.count);
  }
}

class MoeConfigurations : public ::testing::TestWithParam<ConfiguredMode> {};

INSTANTIATE_TEST_SUITE_P(Moe, MoeConfigurations,
                         ::testing::Combine(::testing::Range(size_t{0},
                                                             moe_configurations().size()),
                                            ::testing::ValuesIn(configured_modes())),
                         configured_mode_name);

TEST_P(MoeConfigurations, AgreeWithTheReferenceAndWithTheirShards) {
  const MoeConfiguration& configuration = moe_configurations()[std::get<0>(GetParam())];
  for (const int64_t tokens : {0, 1, 65}) {
    SCOPED_TRACE(std::to_string(tokens) + " tokens");
    const auto layer_case = make_case(configuration, std::get<1>(GetParam()), tokens);
    const MoeResult whole = layer_case->run();
    expect_shards_hold_its_rows(*layer_case, whole, configuration.shards);
    if (tokens == 65) continue;
    const std::string pinned = force_moe("cpu_reference");
    const ForcedImplementation forced(pinned.substr(0, 5), pinned.substr(6));
    EXPECT_EQ(layer_case->run(), whole);
  }
}

// gpt-oss: every width 2880, biases, OAI SwiGLU, interleaved gate; two of its experts.
class MoeWide : public ::testing::TestWithParam<MoeMode> {};
INSTANTIATE_TEST_SUITE_P(Moe, MoeWide,
                         ::testing::Values(MoeMode::kMxfp4Bf16, MoeMode::kMxfp4Fp8,
                                           MoeMode::kMxfp4Mxfp8, MoeMode::kNvfp4Fp8Rounded),
                         mode_test_name);

TEST_P(MoeWide, GptOssWidthsAgreeWithTheReference) {
  const MoeShape shape{.tokens = 1, .hidden = 2880, .inter = 2880, .experts = 2, .top_k = 1};
  MoeCase layer_case(GetParam(), shape, Activation::swiglu_oai(1.702F, 1.0F, 7.0F), 5);
  layer_case.config().gate_order = GateOrder::kInterleaved;
  layer_case.add_biases();
  const MoeResult fast = layer_case.run();
  const std::string pinned = force_moe("cpu_reference");
  const ForcedImplementation forced(pinned.substr(0, 5), pinned.substr(6));
  EXPECT_EQ(layer_case.run(), fast);
}

TEST(MoeMany, AThousandTokensGiveTheBytesOfASmallBatch) {
  for (const MoeMode mode : every_moe_mode()) {
    SCOPED_TRACE(name(mode));
    const MoeShape shape{.tokens = 1000, .hidden = 128, .inter = 128, .experts = 8, .top_k = 2};
    MoeCase layer_case(mode, shape, Activation::swiglu(), 6);
    const MoeLayer layer = layer_case.prepare();
    const MoeResult many = layer_case.run(layer);
    layer_case.inputs().values.shape[0] = 3;
    layer_case.routing().logits.shape[0] = 3;
    const MoeResult few = layer_case.run(layer);
    EXPECT_EQ(std::memcmp(few.out.data(), many.out.data(), few.out.size()), 0);
  }
}

}  // namespace
}  // namespace narrowfloat::testing
