// The configurations of moe spec 13.1: expert counts, groups, shards and activations of real
// models, at widths that a test can afford (kWide keeps gpt-oss's 2880 columns: 22.5 groups of
// 128).
#include <cstring>

#include <gtest/gtest.h>

#include "support/environment.h"
#include "support/moe_case.h"

namespace narrowfloat::testing {
namespace {

struct Shard {
  int32_t offset;
  int32_t count;
};

struct Configuration {
  const char* name;
  MoeShape shape;
  RoutingMethod method = RoutingMethod::kRenormalize;
  int32_t n_group = 1;
  int32_t topk_group = 1;
  ActivationKind activation = ActivationKind::kSwiglu;
  bool weight_on_input = false;
  std::vector<Shard> shards;
};

const Configuration kConfigurations[] = {
    {.name = "small", .shape = {.experts = 8, .top_k = 2}},
    {.name = "every_expert", .shape = {.experts = 8, .top_k = 8}},
    {.name = "deepseek_v3",
     .shape = {.experts = 256, .top_k = 8},
     .method = RoutingMethod::kDeepSeekV3,
     .n_group = 8,
     .topk_group = 4,
     .shards = {{0, 32}, {32, 32}, {224, 32}, {7, 1}, {5, 251}}},
    {.name = "kimi_k2",
     .shape = {.experts = 384, .top_k = 8},
     .method = RoutingMethod::kDeepSeekV3,
     .shards = {{96, 96}}},
    {.name = "nemotron",
     .shape = {.experts = 512, .top_k = 22},
     .method = RoutingMethod::kDeepSeekV3,
     .activation = ActivationKind::kRelu2},
    {.name = "llama4",
     .shape = {.experts = 128, .top_k = 1},
     .method = RoutingMethod::kLlama4,
     .weight_on_input = true},
    {.name = "qwen3",
     .shape = {.experts = 128, .top_k = 8},
     .shards = {{0, 32}, {32, 32}, {64, 32}, {96, 32}}},
    {.name = "e96", .shape = {.experts = 96, .top_k = 8}},
    {.name = "e72", .shape = {.experts = 72, .top_k = 6}},
    {.name = "e90", .shape = {.experts = 90, .top_k = 6}},
    {.name = "e3", .shape = {.experts = 3, .top_k = 2}},
    {.name = "e1", .shape = {.experts = 1, .top_k = 1}},
    {.name = "shared1",
     .shape = {.experts = 64, .top_k = 8, .shared_experts = 1},
     .method = RoutingMethod::kDeepSeekV3,
     .n_group = 4,
     .topk_group = 2},
    {.name = "shared2", .shape = {.experts = 64, .top_k = 8, .shared_experts = 2}},
};

constexpr MoeMode kModes[] = {MoeMode::kBf16,     MoeMode::kFp8Block, MoeMode::kMxfp4Mxfp8,
                              MoeMode::kMxfp4Fp8, MoeMode::kNvfp4,    MoeMode::kNvfp4PerToken};

std::unique_ptr<MoeCase> make_case(const Configuration& configuration, MoeMode mode,
                                   int64_t tokens) {
  MoeShape shape = configuration.shape;
  shape.tokens = tokens;
  shape.hidden = 128;
  shape.inter = 128;
  const Activation activation = configuration.activation == ActivationKind::kSwiglu
                                    ? Activation::swiglu()
                                    : Activation::plain(configuration.activation);
  auto result = std::make_unique<MoeCase>(mode, shape, activation, 99);
  RoutingConfig& routing = result->config().routing;
  routing.method = configuration.method;
  routing.n_group = configuration.n_group;
  routing.topk_group = configuration.topk_group;
  result->config().weight_on_input = configuration.weight_on_input;
  if (configuration.method == RoutingMethod::kDeepSeekV3) {
    routing.routed_scale = 2.5F;
    result->add_router_bias();
  }
  return result;
}

void expect_shards_hold_its_rows(MoeCase& layer_case, const MoeResult& whole,
                                 const std::vector<Shard>& shards) {
  const size_t row_bytes = static_cast<size_t>(layer_case.shape().hidden) * 2;
  for (const Shard& shard : shards) {
    MoeConfig config = layer_case.config();
    config.expert_offset = shard.offset;
    config.local_experts = shard.count;
    const MoeResult part =
        layer_case.run(MoeLayer::prepare(layer_case.shard(shard.offset, shard.count), config));
    const auto* rows = reinterpret_cast<const int32_t*>(part.slot_to_row.data());
    const auto* ids = reinterpret_cast<const int32_t*>(whole.topk_ids.data());
    for (size_t slot = 0; slot < part.slot_to_row.size() / 4; ++slot) {
      const bool is_local = ids[slot] >= shard.offset && ids[slot] < shard.offset + shard.count;
      ASSERT_EQ(rows[slot] >= 0, is_local);
      if (!is_local) continue;
      ASSERT_EQ(std::memcmp(&part.slot_rows[slot * row_bytes], &whole.slot_rows[slot * row_bytes],
                            row_bytes),
                0);
    }
  }
}

class MoeConfigurations : public ::testing::TestWithParam<std::tuple<size_t, MoeMode>> {};

INSTANTIATE_TEST_SUITE_P(Moe, MoeConfigurations,
                         ::testing::Combine(::testing::Range(size_t{0}, std::size(kConfigurations)),
                                            ::testing::ValuesIn(kModes)),
                         [](const auto& param) {
                           return std::string(kConfigurations[std::get<0>(param.param)].name) +
                                  "_" + std::string(name(std::get<1>(param.param)));
                         });

TEST_P(MoeConfigurations, AgreeWithTheReferenceAndWithTheirShards) {
  const Configuration& configuration = kConfigurations[std::get<0>(GetParam())];
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
