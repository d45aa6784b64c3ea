// Properties of the whole layer that hold to the bit (moe spec 13.2 to 13.4).
#include <algorithm>
#include <cmath>
#include <cstring>

#include <gtest/gtest.h>

#include "formats/float16.h"
#include "narrowfloat/moe.h"
#include "support/moe_case.h"

namespace narrowfloat::testing {
namespace {

constexpr MoeShape kLayerShape{.tokens = 7, .hidden = 256, .inter = 128, .experts = 8, .top_k = 2};

class EveryMode : public ::testing::TestWithParam<MoeMode> {};

INSTANTIATE_TEST_SUITE_P(Moe, EveryMode, ::testing::ValuesIn(every_moe_mode()), mode_test_name);

// Precomputed routing over the case's own storage.
struct GivenRouting {
  std::vector<int32_t> ids;
  std::vector<float> weights;

  [[nodiscard]] Routing view(int64_t tokens, int64_t top_k) const {
    Routing routing;
    routing.ids = TensorView::contiguous(ids.data(), DType::kI32, {tokens, top_k});
    routing.weights = TensorView::contiguous(weights.data(), DType::kF32, {tokens, top_k});
    return routing;
  }
};

GivenRouting constant_routing(int64_t tokens, const std::vector<int32_t>& experts) {
  GivenRouting routing;
  for (int64_t token = 0; token < tokens; ++token) {
    for (size_t slot = 0; slot < experts.size(); ++slot) {
      routing.ids.push_back(experts[slot]);
      routing.weights.push_back(0.5F + 0.25F * static_cast<float>(slot));
    }
  }
  return routing;
}

TEST_P(EveryMode, IsTheSameFromRunToRunWhateverMemoryHeld) {
  const MoeCase layer_case(GetParam(), kLayerShape, Activation::swiglu(), 1);
  const MoeLayer layer = layer_case.prepare();
  const MoeResult first = layer_case.run(layer, {.poison = 0x00});
  EXPECT_EQ(first, layer_case.run(layer, {.poison = 0xFF}));
  EXPECT_EQ(first, layer_case.run(layer, {.poison = 0x7F, .guard = Guard::kPage}));
  EXPECT_EQ(first, layer_case.run());
}

TEST_P(EveryMode, AReferenceWithoutOptionsIsTheLayer) {
  const MoeCase layer_case(GetParam(), kLayerShape, Activation::swiglu(), 1);
  EXPECT_EQ(layer_case.run_reference({}), layer_case.run());
}

TEST_P(EveryMode, SlotsCombineToTheOutput) {
  MoeCase layer_case(GetParam(), kLayerShape, Activation::swiglu(), 2);
  layer_case.config().slot_dtype = DType::kF32;
  layer_case.config().out_dtype = DType::kF32;
  const MoeResult result = layer_case.run();
  const std::vector<float> rows = as_floats(result.slot_rows, DType::kF32);
  const std::vector<float> weights = as_floats(result.expert_weights, DType::kF32);
  const std::vector<float> out = as_floats(result.out, DType::kF32);
  for (int64_t token = 0; token < kLayerShape.tokens; ++token) {
    for (int64_t col = 0; col < kLayerShape.hidden; ++col) {
      float sum = 0;
      for (int64_t slot = 0; slot < kLayerShape.top_k; ++slot) {
        const int64_t index = token * kLayerShape.top_k + slot;
        sum = std::fma(weights[static_cast<size_t>(index)],
                       rows[static_cast<size_t>(index * kLayerShape.hidden + col)], sum);
      }
      ASSERT_EQ(sum, out[static_cast<size_t>(token * kLayerShape.hidden + col)]);
    }
  }
}

// Every shard's rows are those of the whole layer, and each slot is on one shard alone.
TEST_P(EveryMode, ShardsHoldTheRowsOfTheWholeLayer) {
  MoeCase layer_case(GetParam(), kLayerShape, Activation::swiglu(), 3);
  layer_case.add_biases();
  const MoeResult whole = layer_case.run();
  std::vector<uint8_t> merged(whole.slot_rows.size());
  for (const auto& [offset, count] :
       std::vector<std::pair<int32_t, int32_t>>{{0, 3}, {3, 1}, {4, 4}}) {
    MoeConfig config = layer_case.config();
    config.expert_offset = offset;
    config.local_experts = count;
    const MoeResult part =
        layer_case.run(MoeLayer::prepare(layer_case.shard(offset, count), config));
    EXPECT_EQ(part.topk_ids, whole.topk_ids);
    EXPECT_EQ(part.expert_weights, whole.expert_weights);
    const auto* rows = reinterpret_cast<const int32_t*>(part.slot_to_row.data());
    const size_t row_bytes = static_cast<size_t>(kLayerShape.hidden) * 2;
    for (size_t slot = 0; slot < part.slot_to_row.size() / 4; ++slot) {
      if (rows[slot] < 0) continue;
      std::memcpy(&merged[slot * row_bytes], &part.slot_rows[slot * row_bytes], row_bytes);
    }
  }
  EXPECT_EQ(merged, whole.slot_rows);
}

TEST_P(EveryMode, TokensWithoutALocalExpertAreZero) {
  MoeCase layer_case(GetParam(), kLayerShape, Activation::swiglu(), 4);
  const GivenRouting routing = constant_routing(kLayerShape.tokens, {0, 1});
  layer_case.routing() = routing.view(kLayerShape.tokens, 2);
  layer_case.config().expert_offset = 4;
  layer_case.config().local_experts = 4;
  const MoeResult result =
      layer_case.run(MoeLayer::prepare(layer_case.shard(4, 4), layer_case.config()));
  EXPECT_TRUE(std::all_of(result.out.begin(), result.out.end(), [](uint8_t b) { return b == 0; }));
}

TEST_P(EveryMode, AllTokensOnOneExpertAndTwiceIsCorrect) {
  MoeShape shape = kLayerShape;
  shape.tokens = 19;
  MoeCase layer_case(GetParam(), shape, Activation::swiglu(), 5);
  layer_case.config().slot_dtype = DType::kF32;
  const GivenRouting routing = constant_routing(shape.tokens, {5, 5});
  layer_case.routing() = routing.view(shape.tokens, 2);
  const MoeResult result = layer_case.run();
  const std::vector<float> rows = as_floats(result.slot_rows, DType::kF32);
  const auto width = static_cast<size_t>(shape.hidden);
  for (size_t slot = 0; slot + 1 < rows.size() / width; slot += 2) {
    EXPECT_TRUE(
        std::equal(&rows[slot * width], &rows[(slot + 1) * width], &rows[(slot + 1) * width]));
  }
}

TEST_P(EveryMode, PermutingTokensPermutesTheOutputs) {
  MoeShape shape = kLayerShape;
  shape.tokens = 65;
  MoeCase layer_case(GetParam(), shape, Activation::swiglu(), 6);
  const MoeResult before = layer_case.run();
  const auto hidden = static_cast<size_t>(shape.hidden);
  const auto experts = static_cast<size_t>(shape.experts);
  const auto tokens = static_cast<size_t>(shape.tokens);
  // Rotated by one: the last token comes first.
  std::rotate(layer_case.x().begin(), layer_case.x().end() - shape.hidden, layer_case.x().end());
  std::rotate(layer_case.logits().begin(), layer_case.logits().end() - shape.experts,
              layer_case.logits().end());
  const MoeResult after = layer_case.run();
  EXPECT_EQ(layer_case.logits().size(), tokens * experts);
  for (size_t token = 0; token < tokens; ++token) {
    const size_t moved = (token + 1) % tokens;
    EXPECT_EQ(
        std::memcmp(&before.out[token * hidden * 2], &after.out[moved * hidden * 2], hidden * 2),
        0);
  }
}

TEST_P(EveryMode, AResultDoesNotDependOnTheBatchOrTheTile) {
  MoeShape shape = kLayerShape;
  shape.tokens = 40;
  MoeCase layer_case(GetParam(), shape, Activation::swiglu(), 7);
  const MoeResult whole = layer_case.run();
  for (const int32_t tile : {1, 8, 64}) {
    layer_case.config().token_tile = tile;
    EXPECT_EQ(layer_case.run().out, whole.out) << "tile " << tile;
  }
  layer_case.config().token_tile.reset();
  layer_case.inputs().values.shape[0] = 1;
  layer_case.routing().logits.shape[0] = 1;
  const MoeResult alone = layer_case.run();
  EXPECT_EQ(std::memcmp(alone.out.data(), whole.out.data(), alone.out.size()), 0);
}

TEST_P(EveryMode, NanInOneTokenStaysThere) {
  MoeCase layer_case(GetParam(), kLayerShape, Activation::swiglu(), 8);
  const MoeResult clean = layer_case.run();
  // NVFP4 has no NaN: its code for one is the largest, so the element here is a small one.
  layer_case.x()[3 * 256 + 19] = 0x7FC0;
  const MoeResult dirty = layer_case.run();
  for (size_t token = 0; token < 7; ++token) {
    const bool is_same = std::memcmp(&clean.out[token * 512], &dirty.out[token * 512], 512) == 0;
    EXPECT_EQ(is_same, token != 3) << "token " << token;
  }
}

TEST_P(EveryMode, TwiceTheDownScaleIsTwiceTheOutput) {
  MoeCase layer_case(GetParam(), kLayerShape, Activation::swiglu(), 9);
  layer_case.config().slot_dtype = DType::kF32;
  layer_case.config().out_dtype = DType::kF32;
  const std::vector<float> once = as_floats(layer_case.run().out, DType::kF32);
  PerExpert& down = layer_case.weights().down_scale;
  std::vector<float> doubled(8, 2 * down.value);
  if (!down.values.is_absent()) {
    const auto* values = static_cast<const float*>(down.values.data);
    for (size_t i = 0; i < 8; ++i) doubled[i] = 2 * values[i];
  }
  down = PerExpert(TensorView::contiguous(doubled.data(), DType::kF32, {8}));
  const std::vector<float> twice = as_floats(layer_case.run().out, DType::kF32);
  for (size_t i = 0; i < once.size(); ++i) ASSERT_EQ(2 * once[i], twice[i]);
}

TEST_P(EveryMode, NoTokensIsASuccess) {
  MoeShape shape = kLayerShape;
  shape.tokens = 0;
  const MoeCase layer_case(GetParam(), shape, Activation::swiglu(), 10);
  EXPECT_TRUE(layer_case.run().out.empty());
}

TEST_P(EveryMode, TakesEveryNumberOfTokens) {
  for (const int64_t tokens : {1, 2, 8, 63, 64, 65, 127, 128}) {
    MoeShape shape{.tokens = tokens, .hidden = 128, .inter = 128, .experts = 6, .top_k = 3};
    const MoeCase layer_case(GetParam(), shape, Activation::swiglu(), 11);
    const MoeLayer layer = layer_case.prepare();
    EXPECT_EQ(layer_case.run(layer, {.poison = 0x00}), layer_case.run(layer, {.poison = 0xFF}))
        << tokens;
  }
}

TEST_P(EveryMode, NarrowerOutputsAreTheFirstColumns) {
  MoeCase layer_case(GetParam(), kLayerShape, Activation::swiglu(), 12);
  const MoeLayer layer = layer_case.prepare();
  const MoeResult full = layer_case.run(layer);
  std::vector<uint16_t> narrow_out(7 * 100, 0xFFFF);
  std::vector<uint8_t> memory(static_cast<size_t>(layer.required_workspace(7)) + 256);
  auto* aligned =
      reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 255) / 256 * 256);
  MoeOutputs outputs;
  outputs.out = TensorView::contiguous(narrow_out.data(), DType::kBF16, {7, 100});
  layer.run(layer_case.inputs(), layer_case.routing(), outputs,
            TensorView::contiguous(aligned, DType::kU8, {layer.required_workspace(7)}));
  for (size_t token = 0; token < 7; ++token) {
    EXPECT_EQ(std::memcmp(&narrow_out[token * 100], &full.out[token * 512], 200), 0);
  }
}

TEST(Moe, TakesEveryTopK) {
  for (int32_t top_k = 1; top_k <= 8; ++top_k) {
    MoeShape shape{.tokens = 9, .hidden = 64, .inter = 32, .experts = 8, .top_k = top_k};
    MoeCase layer_case(MoeMode::kBf16, shape, Activation::swiglu(), 20);
    layer_case.config().routing.method = RoutingMethod::kDefault;
    const MoeResult result = layer_case.run();
    std::vector<int32_t> ids(static_cast<size_t>(9 * top_k));
    std::memcpy(ids.data(), result.topk_ids.data(), result.topk_ids.size());
    for (int64_t token = 0; token < 9; ++token) {
      std::sort(ids.begin() + token * top_k, ids.begin() + (token + 1) * top_k);
      EXPECT_EQ(std::adjacent_find(ids.begin() + token * top_k, ids.begin() + (token + 1) * top_k),
                ids.begin() + (token + 1) * top_k);
    }
  }
}

// Expert e becomes expert (e + 1) % E in weights and ids.
TEST_P(EveryMode, RenamingExpertsChangesNothing) {
  MoeCase layer_case(GetParam(), kLayerShape, Activation::swiglu(), 21);
  GivenRouting routing = constant_routing(kLayerShape.tokens, {2, 6});
  layer_case.routing() = routing.view(kLayerShape.tokens, 2);
  const MoeResult whole = layer_case.run();
  // The shard {6} renamed to expert 0 of a layer of one expert, and {2} likewise.
  MoeConfig config = layer_case.config();
  config.routing.experts = 1;
  config.routing.top_k = 1;
  config.local_experts = 1;
  for (const auto& [expert, slot] : std::vector<std::pair<int32_t, size_t>>{{2, 0}, {6, 1}}) {
    const MoeLayer one = MoeLayer::prepare(layer_case.shard(expert, 1), config);
    const GivenRouting single = constant_routing(kLayerShape.tokens, {0});
    layer_case.routing() = single.view(7, 1);
    const MoeResult alone = layer_case.run(one);
    for (size_t token = 0; token < 7; ++token) {
      EXPECT_EQ(std::memcmp(&alone.slot_rows[token * 512],
                            &whole.slot_rows[(token * 2 + slot) * 512], 512),
                0);
    }
  }
}

TEST(Moe, LogitsPackedAndUnpackedRoutingAgree) {
  MoeCase layer_case(MoeMode::kNvfp4Bf16, kLayerShape, Activation::swiglu(), 22);
  layer_case.config().routing.options.weights_bf16 = true;
  const MoeResult from_logits = layer_case.run();
  const auto* ids = reinterpret_cast<const int32_t*>(from_logits.topk_ids.data());
  const std::vector<float> weights = as_floats(from_logits.expert_weights, DType::kF32);
  std::vector<int32_t> packed(14);
  GivenRouting unpacked;
  for (size_t slot = 0; slot < 14; ++slot) {
    packed[slot] =
        static_cast<int32_t>(static_cast<uint32_t>(ids[slot]) << 16 | float_to_bf16(weights[slot]));
    unpacked.ids.push_back(ids[slot]);
    unpacked.weights.push_back(weights[slot]);
  }
  layer_case.routing() = unpacked.view(7, 2);
  EXPECT_EQ(layer_case.run(), from_logits);
  layer_case.routing() = {};
  layer_case.routing().packed = TensorView::contiguous(packed.data(), DType::kI32, {7, 2});
  EXPECT_EQ(layer_case.run(), from_logits);
}

TEST(Moe, SharedExpertsRunForEveryTokenWithWeightOne) {
  MoeShape shape = kLayerShape;
  shape.shared_experts = 2;
  MoeCase layer_case(MoeMode::kMxfp8, shape, Activation::swiglu(), 23);
  const MoeResult result = layer_case.run();
  const auto* ids = reinterpret_cast<const int32_t*>(result.topk_ids.data());
  const std::vector<float> weights = as_floats(result.expert_weights, DType::kF32);
  for (size_t token = 0; token < 7; ++token) {
    EXPECT_EQ(ids[token * 4 + 2], 8);
    EXPECT_EQ(ids[token * 4 + 3], 9);
    EXPECT_EQ(weights[token * 4 + 2], 1.0F);
    EXPECT_EQ(weights[token * 4 + 3], 1.0F);
  }
  // The same rows as those experts give when they are routed to.
  MoeConfig config = layer_case.config();
  config.routing.experts = 2;
  config.routing.shared_experts = 0;
  config.local_experts = 2;
  const GivenRouting routing = constant_routing(7, {0, 1});
  layer_case.routing() = routing.view(7, 2);
  const MoeResult shared = layer_case.run(MoeLayer::prepare(layer_case.shard(8, 2), config));
  for (size_t token = 0; token < 7; ++token) {
    EXPECT_EQ(std::memcmp(&shared.slot_rows[token * 1024], &result.slot_rows[(token * 4 + 2) * 512],
                          1024),
              0);
  }
}

// Llama-4: the weight goes in before the activation, so doubling it is not doubling the output.
TEST(Moe, WeightOnInputScalesTheFirstGemm) {
  MoeShape shape = kLayerShape;
  shape.top_k = 1;
  MoeCase layer_case(MoeMode::kBf16, shape, Activation::plain(ActivationKind::kRelu2), 24);
  layer_case.config().weight_on_input = true;
  layer_case.config().slot_dtype = DType::kF32;
  layer_case.config().out_dtype = DType::kF32;
  GivenRouting routing = constant_routing(7, {3});
  layer_case.routing() = routing.view(7, 1);
  const std::vector<float> once = as_floats(layer_case.run().out, DType::kF32);
  for (float& weight : routing.weights) weight *= 2;
  const std::vector<float> twice = as_floats(layer_case.run().out, DType::kF32);
  // relu(2x)^2 is 4 relu(x)^2, exactly.
  for (size_t i = 0; i < once.size(); ++i) ASSERT_EQ(4 * once[i], twice[i]);
}

TEST(Moe, DoubleQuantizationIsAnotherResultNearby) {
  MoeCase layer_case(MoeMode::kFp8Block, kLayerShape, Activation::swiglu(), 25);
  layer_case.config().out_dtype = DType::kF32;
  const std::vector<float> once = as_floats(layer_case.run().out, DType::kF32);
  const std::vector<float> twice =
      as_floats(layer_case.run_reference({.double_quantize_fc1 = true}).out, DType::kF32);
  const Distance apart = distance(twice, once, 256);
  EXPECT_GT(apart.rel, 1e-3);
  EXPECT_LT(apart.rel, 8e-2);
}

TEST(Moe, Fp32RowsRoundLess) {
  MoeCase layer_case(MoeMode::kBf16, kLayerShape, Activation::swiglu(), 26);
  layer_case.config().slot_dtype = DType::kF32;
  layer_case.config().out_dtype = DType::kF32;
  const auto out_of = [&](const MoeReferenceOptions& options) {
    return as_floats(layer_case.run_reference(options).out, DType::kF32);
  };
  const std::vector<float> rounded = out_of({.accumulation = Accumulation::kFp64});
  const std::vector<float> exact = out_of({.accumulation = Accumulation::kFp64, .fp32_rows = true});
  const std::vector<float> fp32 = out_of({.fp32_rows = true});
  EXPECT_GT(distance(rounded, exact, 256).rel, 5e-4);
  EXPECT_LT(distance(rounded, exact, 256).rel, 3e-3);
  EXPECT_LT(distance(fp32, exact, 256).rel, 1e-6);
}

}  // namespace
}  // namespace narrowfloat::testing
