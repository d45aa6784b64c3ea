// route(), permute() and combine() on a GPU where conformance does not reach: batches of real
// models, a million tokens with ties, ids and rows that do not exist, the three in a row in a
// captured graph, more than 2^31 elements. The CPU's bytes everywhere.
#include <algorithm>
#include <numeric>
#include <string>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "cuda/gpu_test.h"
#include "cuda/random_bytes.h"
#include "narrowfloat/combine.h"
#include "narrowfloat/permute.h"
#include "narrowfloat/route.h"
#include "support/device_buffer.h"
#include "support/device_copies.h"
#include "support/environment.h"
#include "support/expect_error.h"
#include "support/tensors.h"

namespace narrowfloat::testing {
namespace {

using Bytes = std::vector<uint8_t>;

TensorView matrix(const Vector& vector, DType dtype, int64_t rows, int64_t cols) {
  return TensorView::contiguous(vector.buffer().data(), dtype, {rows, cols});
}

struct Model {
  std::string_view name;
  RoutingConfig config;
  int64_t hidden = 0;
  DType logits = DType::kF32;
};

constexpr auto kDeepSeek = RoutingMethod::kDeepSeekV3;
constexpr auto kRenormalize = RoutingMethod::kRenormalize;

std::vector<Model> models() {
  return {
      {"deepseek_v3",
       {.method = kDeepSeek,
        .experts = 256,
        .top_k = 8,
        .n_group = 8,
        .topk_group = 4,
        .routed_scale = 2.5F},
       7168},
      {"deepseek_v3_shared",
       {.method = kDeepSeek,
        .experts = 256,
        .top_k = 8,
        .shared_experts = 1,
        .n_group = 8,
        .topk_group = 4,
        .routed_scale = 2.5F},
       7168},
      {"kimi_k2", {.method = kDeepSeek, .experts = 384, .top_k = 8, .routed_scale = 2.827F}, 7168},
      {"gpt_oss_120b", {.method = kRenormalize, .experts = 128, .top_k = 4}, 2880, DType::kBF16},
      {"gpt_oss_20b", {.method = kRenormalize, .experts = 32, .top_k = 4}, 2880, DType::kBF16},
      {"qwen3_30b", {.method = kRenormalize, .experts = 128, .top_k = 8}, 2048},
      {"llama4", {.method = RoutingMethod::kLlama4, .experts = 16, .top_k = 1}, 5120},
      {"mixtral", {.method = RoutingMethod::kDefault, .experts = 8, .top_k = 2}, 4096, DType::kF16},
      {"nemotron",
       {.method = RoutingMethod::kMiniMax2, .experts = 512, .top_k = 22, .routed_scale = 5.0F},
       1024},
      {"many_experts",
       {.method = RoutingMethod::kSigmoidRenorm, .experts = 1000, .top_k = 40},
       512}};
}

// Everything between the logits of some tokens and their output rows but the experts' work: a row
// of the permutation holds what the buffer holds there.
class Layer {
 public:
  Layer(const Model& model, int64_t tokens, uint64_t seed)
      : model_(model),
        tokens_(tokens),
        slots_(model.config.top_k + model.config.shared_experts),
        experts_(model.config.experts + model.config.shared_experts),
        layout_(permutation_layout(tokens, slots_, experts_,
                                   default_token_tile(tokens, slots_, experts_))),
        logits_({.dtype = model.logits, .rows = tokens, .cols = model.config.experts, .gap = 3}),
        bias_(DType::kF32, model.config.experts),
        ids_(DType::kI32, tokens * slots_),
        weights_(DType::kF32, tokens * slots_),
        maps_(layout_.bytes, {}),
        slot_rows_({.rows = layout_.max_rows, .cols = model.hidden}),
        output_({.rows = tokens, .cols = model.hidden}) {
    Random random(seed);
    fill_elements(Fill::kNormal, DType::kF32, random, model.config.experts, bias_.buffer().data());
    // Finite bf16 numbers, most of them far from 1.
    random_bytes(slot_rows_.buffer().span(), seed + 1);
    for (uint16_t& bits : slot_rows_.buffer().span<uint16_t>()) bits &= 0xBFFFU;
    draw_logits(seed + 2);
  }

  void draw_logits(uint64_t seed) const {
    Random random(seed);
    for (int64_t token = 0; token < tokens_; ++token) {
      const auto fill = token % 16 == 0 ? Fill::kQuarterIntegers : Fill::kNormal;
      fill_elements(fill, model_.logits, random, model_.config.experts, logits_.row(token));
    }
  }

  [[nodiscard]] Buffers buffers() const {
    return {&logits_.buffer(),    &bias_.buffer(),  &ids_.buffer(), &weights_.buffer(), &maps_,
            &slot_rows_.buffer(), &output_.buffer()};
  }

  void queue(const DeviceCopies& device, Stream stream) const {
    const bool takes_bias =
        model_.config.method == kDeepSeek || model_.config.method == RoutingMethod::kMiniMax2;
    const Routing routing{.logits = device.view(logits_.view()),
                          .bias = takes_bias ? device.view(bias_.view()) : TensorView{}};
    const TensorView ids = device.view(matrix(ids_, DType::kI32, tokens_, slots_));
    const TensorView weights = device.view(matrix(weights_, DType::kF32, tokens_, slots_));
    route(routing, model_.config, {.ids = ids, .weights = weights}, stream);
    const TensorView maps =
        device.view(TensorView::contiguous(maps_.data(), DType::kI32, {layout_.bytes / 4}));
    const Permutation permutation = layout_.bind(maps.data, maps.device);
    permute(ids, 0, experts_, permutation, stream);
    combine(device.view(slot_rows_.view()), permutation.slot_to_row, weights,
            device.view(output_.view()), stream);
  }

  [[nodiscard]] std::vector<Bytes> outputs() const {
    return {ids_.buffer().copy(), weights_.buffer().copy(), maps_.copy(), output_.elements()};
  }

  [[nodiscard]] std::vector<Bytes> run_on_cpu() const {
    queue(DeviceCopies(buffers(), {.on_host = true}), {});
    return outputs();
  }

  void poison_outputs() const {
    for (const GuardedBuffer* buffer :
         {&ids_.buffer(), &weights_.buffer(), &maps_, &output_.buffer()}) {
      std::ranges::fill(buffer->span(), uint8_t{0xFF});
    }
  }

 private:
  Model model_;
  int64_t tokens_;
  int64_t slots_;
  int32_t experts_;
  PermutationLayout layout_;
  Matrix logits_;
  Vector bias_;
  Vector ids_;
  Vector weights_;
  GuardedBuffer maps_;
  Matrix slot_rows_;
  Matrix output_;
};

constexpr std::array kOutputNames{"ids", "weights", "maps", "output"};

void expect_equal(const std::vector<Bytes>& expected, const std::vector<Bytes>& actual) {
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto [e, a] = std::ranges::mismatch(expected[i], actual[i]);
    EXPECT_TRUE(e == expected[i].end() && a == actual[i].end())
        << kOutputNames[i] << " differ at byte " << e - expected[i].begin();
  }
}

class RoutingOnTheGpu : public GpuTest {};

class RoutingOfModels : public GpuTestWith<Model> {};

TEST_P(RoutingOfModels, GivesTheCpusBytes) {
  for (const int64_t tokens : {1, 5, 64, 300, 1025, 16384}) {
    Model model = GetParam();
    // The combine of a large batch is about its tokens: narrower rows will do.
    if (tokens > 2000) model.hidden = 64;
    const Layer layer(model, tokens, static_cast<uint64_t>(tokens));
    const std::vector<Bytes> expected = layer.run_on_cpu();
    for (const bool programmatic_launch : {false, true}) {
      SCOPED_TRACE(fmt::format("{} tokens, programmatic {}", tokens, programmatic_launch));
      layer.poison_outputs();
      const DeviceCopies device(layer.buffers(), {.programmatic_launch = programmatic_launch});
      layer.queue(device, device.stream());
      EXPECT_TRUE(device.take_back());
      expect_equal(expected, layer.outputs());
    }
  }
}

// Contents change between replays; the graph stays.
TEST_P(RoutingOfModels, ReplaysAsAGraph) {
  for (const int64_t tokens : {0, 3, 200, 3000}) {
    Model model = GetParam();
    model.hidden = 256;
    const Layer layer(model, tokens, 7);
    const DeviceCopies device(layer.buffers());
    const CudaStream stream;
    layer.queue(device, stream.get());
    const CapturedGraph graph(stream, [&] { layer.queue(device, stream.get(true)); });
    const RoutingConfig& config = model.config;
    EXPECT_LE(graph.num_nodes(), tokens * (config.top_k + config.shared_experts) > 4096 ? 5 : 3);
    for (uint64_t seed = 0; seed < 10; ++seed) {
      layer.draw_logits(seed);
      const std::vector<Bytes> expected = layer.run_on_cpu();
      layer.poison_outputs();
      device.send();
      graph.replay(static_cast<int>(1 + seed % 3));
      EXPECT_TRUE(device.take_back());
      expect_equal(expected, layer.outputs());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, RoutingOfModels, ::testing::ValuesIn(models()),
                         [](const auto& test) { return std::string(test.param.name); });

TEST_F(RoutingOnTheGpu, StreamsRunAtOnceAndRunsAreEqual) {
  const Layer layer(models().front(), 2500, 3);
  const std::vector<Bytes> expected = layer.run_on_cpu();
  layer.poison_outputs();
  const DeviceCopies first(layer.buffers());
  const DeviceCopies second(layer.buffers(), {.programmatic_launch = true});
  for (int i = 0; i < 100; ++i) {
    layer.queue(first, first.stream());
    layer.queue(second, second.stream());
    if (i % 20 != 19) continue;
    for (const DeviceCopies* device : {&first, &second}) {
      EXPECT_TRUE(device->take_back());
      expect_equal(expected, layer.outputs());
    }
  }
}

// Ids of 2^20 tokens whose keys tie all the time (moe spec 13.2).
class RoutingTies : public GpuTestWith<int> {};

TEST_P(RoutingTies, GoToTheLowerIdOnBothSides) {
  constexpr int64_t kTokens = 1 << 20;
  constexpr int32_t kExperts = 16;
  RoutingConfig config{
      .method = static_cast<RoutingMethod>(GetParam()), .experts = kExperts, .top_k = 4};
  if (config.method == RoutingMethod::kLlama4) config.top_k = 1;
  if (config.method == kDeepSeek) {
    config.n_group = 4;
    config.topk_group = 2;
  }
  const Vector logits(DType::kBF16, kTokens * kExperts);
  random_bytes(logits.buffer().span(), 5);
  for (uint16_t& bits : logits.buffer().span<uint16_t>()) {
    const auto quarter = static_cast<float>(static_cast<int>(bits % 41) - 20);
    bits = static_cast<uint16_t>(element_bits(DType::kBF16, quarter * 0.25F));
  }
  const Vector ids(DType::kI32, kTokens * config.top_k);
  const Vector weights(DType::kF32, kTokens * config.top_k);
  const auto run = [&](bool on_host) {
    const DeviceCopies device({&logits.buffer(), &ids.buffer(), &weights.buffer()},
                              {.on_host = on_host});
    const auto view = [&](const Vector& vector, DType dtype, int64_t cols) {
      return device.view(matrix(vector, dtype, kTokens, cols));
    };
    route({.logits = view(logits, DType::kBF16, kExperts)}, config,
          {.ids = view(ids, DType::kI32, config.top_k),
           .weights = view(weights, DType::kF32, config.top_k)},
          device.stream());
    EXPECT_TRUE(device.take_back());
    return std::vector<Bytes>{ids.buffer().copy(), weights.buffer().copy()};
  };
  const std::vector<Bytes> expected = run(true);
  std::ranges::fill(ids.buffer().span(), uint8_t{0xFF});
  expect_equal(expected, run(false));
}

INSTANTIATE_TEST_SUITE_P(All, RoutingTies, ::testing::Range(0, 10), [](const auto& test) {
  return std::string(name(static_cast<RoutingMethod>(test.param)));
});

}  // namespace
}  // namespace narrowfloat::testing
