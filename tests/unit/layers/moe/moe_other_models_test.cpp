// Layers of Llama-4, MiniMax-M2 and DeepSeek-V4: their names, shapes and routers.
#include <cstring>
#include <filesystem>
#include <fstream>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/float_ops.h"
#include "narrowfloat/moe_checkpoint.h"
#include "support/expect_error.h"
#include "support/gpt_oss_files.h"
#include "support/random.h"
#include "support/temp_dir.h"
#include "support/tensor_shards.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kOtherExperts = 3;
constexpr int64_t kOtherHidden = 48;
constexpr int64_t kOtherInter = 80;

FileTensor random_tensor(const std::string& name, DType dtype, const std::vector<int64_t>& shape) {
  FileTensor tensor{{name, dtype, shape}, {}};
  int64_t count = 1;
  for (const int64_t extent : shape) count *= extent;
  Random random(name.size() + static_cast<uint64_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t value = float_bits(random.normal());
    if (dtype == DType::kF32) tensor.data.push_back(static_cast<uint8_t>(value));
    if (dtype == DType::kF32) tensor.data.push_back(static_cast<uint8_t>(value >> 8));
    tensor.data.push_back(static_cast<uint8_t>(value >> 16));
    tensor.data.push_back(static_cast<uint8_t>(value >> 24));
  }
  return tensor;
}

class OtherModels : public ::testing::Test {
 protected:
  [[nodiscard]] LoadedMoe load(const std::vector<FileTensor>& tensors, const std::string& config,
                               int64_t layer, const LoadMoeOptions& options = {}) const {
    std::filesystem::create_directories(dir_);
    write_tensors((dir_ / "model.safetensors").string(), tensors);
    std::ofstream((dir_ / "config.json").string()) << config;
    return {Checkpoint(dir_.string()), layer, options};
  }

  const TempDir temp_;
  const std::filesystem::path dir_ = temp_.path();
};

constexpr const char* kLlama4Config =
    R"({"model_type": "llama4", "text_config": {"model_type": "llama4_text", "hidden_act": "silu",
        "num_local_experts": 3, "num_experts_per_tok": 1}})";
const std::string kLlama4Block = "language_model.model.layers.1.feed_forward.";

std::vector<FileTensor> llama4_layer(DType dtype) {
  return {
      random_tensor(kLlama4Block + "experts.gate_up_proj", dtype,
                    {kOtherExperts, kOtherHidden, 2 * kOtherInter}),
      random_tensor(kLlama4Block + "experts.down_proj", dtype,
                    {kOtherExperts, kOtherInter, kOtherHidden}),
      random_tensor(kLlama4Block + "router.weight", DType::kBF16, {kOtherExperts, kOtherHidden}),
      random_tensor(kLlama4Block + "shared_expert.up_proj.weight", dtype,
                    {kOtherInter, kOtherHidden})};
}

TEST_F(OtherModels, Llama4StacksPlainExpertsTransposed) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const std::vector<FileTensor> tensors = llama4_layer(dtype);
    const LoadedMoe loaded = load(tensors, kLlama4Config, 1);
    const MoeConfig& config = loaded.config();
    EXPECT_EQ(config.hidden, kOtherHidden);
    EXPECT_EQ(config.inter, kOtherInter);
    EXPECT_EQ(config.gate_order, GateOrder::kGateUp);
    EXPECT_TRUE(config.weight_on_input);
    EXPECT_EQ(config.routing.method, RoutingMethod::kLlama4);
    EXPECT_EQ(config.routing.top_k, 1);
    EXPECT_EQ(config.activation.kind, ActivationKind::kSwiglu);
    EXPECT_EQ(config.activation.limit_up.value, Activation::kNoLimit);
    EXPECT_TRUE(loaded.router_logit_bias().is_absent());
    EXPECT_TRUE(loaded.router_bias().is_absent());
    const auto* w1 = static_cast<const uint16_t*>(loaded.weights().w1.values.data);
    const auto* w2 = static_cast<const uint16_t*>(loaded.weights().w2.values.data);
    // Element [expert, col, row] of a tensor, rounded to bf16 where it is F32.
    const auto stored = [&](size_t tensor, int64_t index) {
      float value = 0;
      uint16_t upper = 0;
      const uint8_t* data = tensors[tensor].data.data();
      if (dtype == DType::kBF16) {
        std::memcpy(&upper, data + 2 * index, 2);
        return upper;
      }
      std::memcpy(&value, data + 4 * index, 4);
      const uint32_t bits = float_bits(value);
      return static_cast<uint16_t>((bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16);
    };
    for (int64_t expert = 0; expert < kOtherExperts; ++expert) {
      for (int64_t row = 0; row < 2 * kOtherInter; ++row) {
        for (int64_t col = 0; col < kOtherHidden; ++col) {
          ASSERT_EQ(w1[(expert * 2 * kOtherInter + row) * kOtherHidden + col],
                    stored(0, (expert * kOtherHidden + col) * 2 * kOtherInter + row));
        }
      }
      for (int64_t row = 0; row < kOtherHidden; ++row) {
        for (int64_t col = 0; col < kOtherInter; ++col) {
          ASSERT_EQ(w2[(expert * kOtherHidden + row) * kOtherInter + col],
                    stored(1, (expert * kOtherInter + col) * kOtherHidden + row));
        }
      }
    }
    (void)MoeLayer::prepare(loaded.weights(), config);
  }
}

TEST_F(OtherModels, Llama4ShardsAndQuantizedModes) {
  LoadMoeOptions options;
  const std::vector<FileTensor> tensors = llama4_layer(DType::kBF16);
  const LoadedMoe whole = load(tensors, kLlama4Config, 1);
  options.expert_offset = 2;
  const LoadedMoe shard = load(tensors, kLlama4Config, 1, options);
  const size_t expert_bytes = 2 * kOtherInter * kOtherHidden * 2;
  EXPECT_EQ(
      std::memcmp(shard.weights().w1.values.data,
                  static_cast<const uint8_t*>(whole.weights().w1.values.data) + 2 * expert_bytes,
                  expert_bytes),
      0);
  options = {};
  options.mode = MoeMode::kNvfp4Bf16;
  const LoadedMoe coded = load(tensors, kLlama4Config, 1, options);
  // One global scale for gate and up of an expert.
  const auto* gate = static_cast<const float*>(coded.weights().gate_scale.values.data);
  const auto* up = static_cast<const float*>(coded.weights().up_scale.values.data);
  for (int64_t expert = 0; expert < kOtherExperts; ++expert) EXPECT_EQ(gate[expert], up[expert]);
  (void)MoeLayer::prepare(coded.weights(), coded.config());
}

TEST_F(OtherModels, Llama4sTensorRanksHoldTheirPartAlone) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const LoadedMoe whole = load(llama4_layer(dtype), kLlama4Config, 1);
    const Checkpoint checkpoint(dir_.string());
    LoadMoeOptions options;
    options.tensor_ranks = 5;
    for (options.tensor_rank = 0; options.tensor_rank < 5; ++options.tensor_rank) {
      const LoadedMoe part(checkpoint, 1, options);
      expect_tensor_shard(whole, part, options.tensor_rank, 5);
      EXPECT_EQ(part.stored_bytes() * 5, whole.stored_bytes());
    }
  }
}

// Two experts of 128 x 256, one by one: two blocks of 128 for two ranks.
TEST_F(OtherModels, TensorRanksHoldTheirPartOfEveryConvention) {
  const std::string block = "model.layers.0.block_sparse_moe.";
  std::vector<FileTensor> tensors = {random_tensor(block + "gate.weight", DType::kBF16, {2, 128})};
  for (const std::string expert : {"0", "1"}) {
    const std::string stem = block + "experts." + expert + ".";
    tensors.push_back(random_tensor(stem + "w1.weight", DType::kBF16, {256, 128}));
    tensors.push_back(random_tensor(stem + "w3.weight", DType::kBF16, {256, 128}));
    tensors.push_back(random_tensor(stem + "w2.weight", DType::kBF16, {128, 256}));
    tensors.push_back(random_tensor(stem + "w1.bias", DType::kBF16, {256}));
    tensors.push_back(random_tensor(stem + "w2.bias", DType::kBF16, {128}));
  }
  const LoadedMoe plain = load(
      tensors, R"({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1})", 0);
  const TempDir targets;
  // All that a layer has modes for; gpt-oss' is stacked.
  for (const Convention id : {Convention::kNvfp4CompressedTensors, Convention::kNvfp4ModelOpt,
                              Convention::kMxfp4CompressedTensors,
                              Convention::kMxfp8CompressedTensors, Convention::kFp8Block}) {
    const ConventionInfo& convention = convention_info(id);
    SCOPED_TRACE(convention.name);
    const std::string path = targets / std::string(convention.name);
    QuantizeCheckpointOptions to;
    to.to = convention.id;
    to.measure = false;
    quantize_checkpoint(dir_.string(), path, to);
    const Checkpoint checkpoint(path);
    const LoadedMoe whole(checkpoint, 0);
    EXPECT_NE(whole.stored_format(), plain.stored_format());
    LoadMoeOptions options;
    options.tensor_ranks = 2;
    uint64_t stored_bytes = 0;
    (void)LoadedMoe(checkpoint, 0, options);  // Threads read files when they start.
    for (options.tensor_rank = 0; options.tensor_rank < 2; ++options.tensor_rank) {
      const uint64_t before = bytes_read();
      const LoadedMoe part(checkpoint, 0, options);
      const uint64_t read = bytes_read() - before;
      expect_tensor_shard(whole, part, options.tensor_rank, 2);
      stored_bytes += part.stored_bytes();
      if (read > 0) {
        EXPECT_GE(read, part.stored_bytes() + 512);  // The router.
        EXPECT_LT(read, part.stored_bytes() + 512 + 1024);
      }
      // One global scale is that of both parts.
      for (const auto scale :
           {&MoeWeights::gate_scale, &MoeWeights::up_scale, &MoeWeights::down_scale}) {
        EXPECT_EQ(std::memcmp((part.weights().*scale).values.data,
                              (whole.weights().*scale).values.data, 8),
                  0);
      }
      (void)MoeLayer::prepare(part.weights(), part.config());
    }
    // Both read the six global scales.
    EXPECT_GE(stored_bytes, whole.stored_bytes());
    EXPECT_LE(stored_bytes, whole.stored_bytes() + 24);
    options.tensor_rank = 0;
    options.tensor_ranks = 3;
    expect_error(ErrorKind::kInvalidArgument, {"tensor_ranks", "256", "got 3"},
                 [&] { (void)LoadedMoe(checkpoint, 0, options); });
  }
}

TEST_F(OtherModels, Llama4ExpertsMayLieOneByOne) {
  std::vector<FileTensor> tensors = {
      random_tensor(kLlama4Block + "router.weight", DType::kBF16, {kOtherExperts, kOtherHidden})};
  for (const std::string expert : {"0", "1", "2"}) {
    const std::string stem = fmt::format("{}experts.{}.", kLlama4Block, expert);
    tensors.push_back(
        random_tensor(stem + "gate_proj.weight", DType::kBF16, {kOtherInter, kOtherHidden}));
    tensors.push_back(
        random_tensor(stem + "up_proj.weight", DType::kBF16, {kOtherInter, kOtherHidden}));
    tensors.push_back(
        random_tensor(stem + "down_proj.weight", DType::kBF16, {kOtherHidden, kOtherInter}));
  }
  const LoadedMoe loaded = load(tensors, kLlama4Config, 1);
  EXPECT_EQ(loaded.config().gate_order, GateOrder::kGateUp);
  EXPECT_TRUE(loaded.config().weight_on_input);
}

TEST_F(OtherModels, MiniMaxHasItsBiasBesideTheRouter) {
  const std::string block = "model.layers.0.block_sparse_moe.";
  std::vector<FileTensor> tensors = {
      random_tensor(block + "gate.weight", DType::kF32, {kOtherExperts, kOtherHidden}),
      random_tensor(block + "e_score_correction_bias", DType::kF32, {kOtherExperts})};
  for (const std::string expert : {"0", "1", "2"}) {
    for (const std::string matrix : {"w1", "w3", "w2"}) {
      const bool is_down = matrix == "w2";
      const std::string name = fmt::format("{}experts.{}.{}.weight", block, expert, matrix);
      tensors.push_back(random_tensor(
          name, DType::kBF16,
          {is_down ? kOtherHidden : kOtherInter, is_down ? kOtherInter : kOtherHidden}));
    }
  }
  const std::string config =
      R"({"model_type": "minimax_m2", "num_local_experts": 3, "num_experts_per_tok": 2,
          "scoring_func": "sigmoid", "use_routing_bias": true, "hidden_act": "silu"})";
  const LoadedMoe loaded = load(tensors, config, 0);
  EXPECT_EQ(loaded.config().routing.method, RoutingMethod::kMiniMax2);
  EXPECT_EQ(loaded.config().routing.routed_scale, 1.0F);
  EXPECT_EQ(loaded.config().inter, kOtherInter);
  ASSERT_EQ(to_string(loaded.router_bias()), "F32[3]");
  EXPECT_EQ(std::memcmp(loaded.router_bias().data, tensors[1].data.data(), kOtherExperts * 4), 0);
  EXPECT_TRUE(loaded.router_logit_bias().is_absent());
  (void)MoeLayer::prepare(loaded.weights(), loaded.config());
  tensors.erase(tensors.begin() + 1);
  expect_error(ErrorKind::kCorruptData, {"router's", "e_score_correction_bias", "[3]"},
               [&] { (void)load(tensors, config, 0); });
}

// Its layers are found; its scores are none of the library's routing methods.
TEST_F(OtherModels, DeepSeekV4IsRefusedForItsRouting) {
  std::vector<FileTensor> tensors;
  for (const std::string matrix : {"w1", "w3", "w2"}) {
    const std::string stem = "layers.2.ffn.experts.0." + matrix + ".";
    tensors.push_back({{stem + "weight", DType::kI8, {32, 16}}, std::vector<uint8_t>(512)});
    tensors.push_back({{stem + "scale", DType::kF8E8M0, {32, 1}}, std::vector<uint8_t>(32)});
  }
  expect_error(ErrorKind::kUnsupported, {"model_type", "deepseek_v4", "gpt_oss"}, [&] {
    (void)load(tensors, R"({"model_type": "deepseek_v4", "scoring_func": "sqrtsoftplus"})", 2);
  });
  EXPECT_EQ(moe_layers(Checkpoint(dir_.string())), std::vector<int64_t>{2});
}

}  // namespace
}  // namespace narrowfloat::testing
