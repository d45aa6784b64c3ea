// The table. A new configuration is a few lines.
#include "support/moe_configurations.h"

namespace narrowfloat::testing {
namespace {

const MoeConfiguration kConfigurations[] = {
    {.name = "small",
     .shape = {.hidden = 256, .inter = 128, .experts = 8, .top_k = 2},
     .in_every_mode = true,
     .at_many_counts = true},
    {.name = "every_expert",
     .shape = {.hidden = 256, .inter = 256, .experts = 8, .top_k = 8},
     .in_every_mode = true,
     .at_many_counts = true},
    {.name = "odd",
     .shape = {.experts = 16, .top_k = 4},
     .has_odd_extents = true,
     .in_every_mode = true},
    {.name = "deepseek_v3",
     .shape = {.hidden = 1024, .inter = 512, .experts = 256, .top_k = 8},
     .method = RoutingMethod::kDeepSeekV3,
     .n_group = 8,
     .topk_group = 4,
     .at_many_counts = true,
     .shards = {{0, 32}, {32, 32}, {224, 32}, {7, 1}, {5, 251}}},
    {.name = "kimi_k2",
     .shape = {.hidden = 1024, .inter = 512, .experts = 384, .top_k = 8},
     .method = RoutingMethod::kDeepSeekV3,
     .shards = {{96, 96}}},
    {.name = "nemotron",
     .shape = {.hidden = 1024, .inter = 2688, .experts = 512, .top_k = 22},
     .method = RoutingMethod::kDeepSeekV3,
     .activation = ActivationKind::kRelu2},
    {.name = "llama4",
     .shape = {.hidden = 1024, .inter = 2048, .experts = 128, .top_k = 1},
     .method = RoutingMethod::kLlama4,
     .weight_on_input = true},
    {.name = "qwen3",
     .shape = {.hidden = 2048, .inter = 768, .experts = 128, .top_k = 8},
     .at_many_counts = true,
     .shards = {{0, 32}, {32, 32}, {64, 32}, {96, 32}}},
    {.name = "e96", .shape = {.experts = 96, .top_k = 8}},
    {.name = "e72", .shape = {.experts = 72, .top_k = 6}},
    {.name = "e90", .shape = {.experts = 90, .top_k = 6}},
    {.name = "e3", .shape = {.experts = 3, .top_k = 2}},
    {.name = "e1", .shape = {.experts = 1, .top_k = 1}},
    {.name = "shared1",
     .shape = {.hidden = 1024, .inter = 512, .experts = 256, .top_k = 8, .shared_experts = 1},
     .method = RoutingMethod::kDeepSeekV3,
     .n_group = 8,
     .topk_group = 4},
    {.name = "shared2",
     .shape = {.hidden = 1024, .inter = 512, .experts = 256, .top_k = 8, .shared_experts = 2}},
};

constexpr MoeMode kModes[] = {MoeMode::kBf16,     MoeMode::kFp8Block, MoeMode::kMxfp4Mxfp8,
                              MoeMode::kMxfp4Fp8, MoeMode::kNvfp4,    MoeMode::kNvfp4PerToken};

}  // namespace

std::span<const MoeConfiguration> moe_configurations() { return kConfigurations; }

std::span<const MoeMode> configured_modes() { return kModes; }

MoeShape odd_extents(MoeMode mode, MoeShape shape) {
  switch (moe_mode_info(mode).weights) {
    case WeightFormat::kBf16:
    case WeightFormat::kFp8Tensor:
      shape.hidden = 144;
      shape.inter = 272;
      break;
    case WeightFormat::kFp8Block:
      shape.hidden = 384;
      shape.inter = 640;
      break;
    case WeightFormat::kMxfp8:
    case WeightFormat::kMxfp4:
      shape.hidden = 160;
      shape.inter = 96;
      break;
    case WeightFormat::kNvfp4:
      shape.hidden = 144;
      shape.inter = 80;
      break;
  }
  return shape;
}

std::unique_ptr<MoeCase> make_case(const MoeConfiguration& configuration, MoeMode mode,
                                   int64_t tokens, bool is_wide) {
  MoeShape shape = configuration.shape;
  shape.tokens = tokens;
  if (!is_wide) shape.hidden = shape.inter = 128;
  if (configuration.has_odd_extents) shape = odd_extents(mode, shape);
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

std::string configured_mode_name(const ::testing::TestParamInfo<ConfiguredMode>& param) {
  return std::string(moe_configurations()[std::get<0>(param.param)].name) + "_" +
         std::string(name(std::get<1>(param.param)));
}

}  // namespace narrowfloat::testing
