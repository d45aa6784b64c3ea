// Layers of gpt-oss: loaded from either of its namings they are the layers that its arrays make.
#include <cstring>
#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>

#include "base/float_ops.h"
#include "narrowfloat/moe_checkpoint.h"
#include "support/expect_error.h"
#include "support/gpt_oss_files.h"
#include "support/moe_case.h"
#include "support/random.h"
#include "support/temp_dir.h"
#include "support/tensor_shards.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kGptOssTokens = 37;

// The inputs of a layer: bf16 rows, and logits that a router with a bias would give.
struct Tokens {
  explicit Tokens(const GptOssShape& shape) : hidden(shape.hidden), experts(shape.experts) {
    Random random(7);
    for (int64_t i = 0; i < kGptOssTokens * hidden; ++i) {
      x.push_back(static_cast<uint16_t>(float_bits(random.normal()) >> 16));
    }
    for (int64_t i = 0; i < kGptOssTokens * experts; ++i) logits.push_back(random.normal());
  }

  int64_t hidden, experts;
  std::vector<uint16_t> x;
  std::vector<float> logits;
};

// Bytes of the output, F32.
std::vector<uint8_t> run(const MoeWeights& weights, MoeConfig config, const Tokens& tokens) {
  config.out_dtype = DType::kF32;
  const MoeLayer layer = MoeLayer::prepare(weights, config);
  const int64_t bytes = layer.required_workspace(kGptOssTokens);
  std::vector<uint8_t> memory(static_cast<size_t>(bytes) + 256);
  uint8_t* workspace = memory.data() + 256 - reinterpret_cast<uintptr_t>(memory.data()) % 256;
  std::vector<uint8_t> out(static_cast<size_t>(kGptOssTokens * config.hidden) * 4);
  MoeInputs inputs;
  inputs.values =
      TensorView::contiguous(tokens.x.data(), DType::kBF16, {kGptOssTokens, tokens.hidden});
  Routing routing;
  routing.logits =
      TensorView::contiguous(tokens.logits.data(), DType::kF32, {kGptOssTokens, tokens.experts});
  MoeOutputs outputs;
  outputs.out = TensorView::contiguous(out.data(), DType::kF32, {kGptOssTokens, config.hidden});
  layer.run(inputs, routing, outputs, TensorView::contiguous(workspace, DType::kU8, {bytes}));
  return out;
}

class GptOss : public ::testing::Test {
 protected:
  [[nodiscard]] std::string path(const std::string& name) const { return (dir_ / name).string(); }
  // A model of these tensors, and its first layer.
  [[nodiscard]] LoadedMoe load(const std::vector<FileTensor>& tensors, const std::string& config,
                               const LoadMoeOptions& options = {}) const {
    std::filesystem::create_directories(dir_);
    write_tensors(path("model.safetensors"), tensors);
    std::ofstream(path("config.json")) << config;
    return {Checkpoint(dir_.string()), 0, options};
  }

  const TempDir temp_;
  const std::filesystem::path dir_ = temp_.path();
};

TEST_F(GptOss, ALoadedLayerIsTheOneOfItsArrays) {
  // 2880 in small: 90 blocks of 32; then square matrices, whose sides could be exchanged.
  for (const GptOssShape& shape :
       {GptOssShape{}, GptOssShape{.hidden = 160, .inter = 96, .experts = 8, .top_k = 4},
        GptOssShape{.hidden = 96, .inter = 96, .experts = 4, .top_k = 1}}) {
    const GptOssModel model(shape, 3);
    const Tokens tokens(shape);
    for (const GptOssNames names : {GptOssNames::kHuggingFace, GptOssNames::kOriginal}) {
      model.write(dir_.string(), names);
      const Checkpoint checkpoint(dir_.string());
      EXPECT_EQ(moe_layers(checkpoint), (std::vector<int64_t>{0, 1}));
      for (const int64_t index : {0, 1}) {
        const LoadedMoe loaded(checkpoint, index);
        const std::vector<uint8_t> wanted =
            run(model.layer(index).weights(shape), model.config(), tokens);
        EXPECT_EQ(run(loaded.weights(), loaded.config(), tokens), wanted);
        EXPECT_EQ(loaded.stored_format(), WeightFormat::kMxfp4);
        EXPECT_EQ(loaded.config().mode, MoeMode::kMxfp4Bf16);
        // Codes, scales and biases.
        const GptOssLayer& layer = model.layer(index);
        EXPECT_EQ(loaded.stored_bytes(), layer.w1.size() + layer.w1_scales.size() +
                                             layer.w2.size() + layer.w2_scales.size() +
                                             2 * (layer.bias1.size() + layer.bias2.size()));
      }
    }
  }
}

TEST_F(GptOss, TheLayersDiffer) {
  const GptOssModel model;
  const Tokens tokens(model.shape());
  EXPECT_NE(run(model.layer(0).weights(model.shape()), model.config(), tokens),
            run(model.layer(1).weights(model.shape()), model.config(), tokens));
}

TEST_F(GptOss, ConfigurationComesFromConfigJson) {
  const GptOssModel model;
  const LoadedMoe loaded =
      load(model.tensors(GptOssNames::kHuggingFace),
           R"({"model_type": "gpt_oss", "num_local_experts": 6, "num_experts_per_tok": 3,
               "swiglu_limit": 5.5, "swiglu_alpha": 1.25})");
  const MoeConfig& config = loaded.config();
  EXPECT_EQ(config.hidden, 96);
  EXPECT_EQ(config.inter, 160);
  EXPECT_EQ(config.routing.method, RoutingMethod::kRenormalize);
  EXPECT_EQ(config.routing.experts, 6);
  EXPECT_EQ(config.routing.top_k, 3);
  EXPECT_EQ(config.local_experts, 6);
  EXPECT_EQ(config.gate_order, GateOrder::kInterleaved);
  EXPECT_FALSE(config.weight_on_input);
  EXPECT_EQ(config.activation.kind, ActivationKind::kSwiglu);
  EXPECT_EQ(config.activation.alpha.value, 1.25F);
  EXPECT_EQ(config.activation.beta.value, 1.0F);
  EXPECT_EQ(config.activation.limit_gate.value, 5.5F);
  EXPECT_EQ(config.activation.limit_up.value, 5.5F);
}

TEST_F(GptOss, TheRoutersBiasIsOneOfTheLogits) {
  const GptOssModel model;
  for (const GptOssNames names : {GptOssNames::kHuggingFace, GptOssNames::kOriginal}) {
    const LoadedMoe loaded = load(model.tensors(names), model.config_text(names));
    EXPECT_TRUE(loaded.router_bias().is_absent());
    ASSERT_EQ(to_string(loaded.router_weight()), "F32[6, 96]");
    ASSERT_EQ(to_string(loaded.router_logit_bias()), "F32[6]");
    const auto* bias = static_cast<const float*>(loaded.router_logit_bias().data);
    const auto* weight = static_cast<const float*>(loaded.router_weight().data);
    const GptOssLayer& layer = model.layer(0);
    for (uint32_t i = 0; i < 6; ++i) {
      EXPECT_EQ(float_bits(bias[i]) >> 16, layer.router_bias[i]);
      EXPECT_EQ(float_bits(weight[i * 96 + 5]) >> 16, layer.router_weight[i * 96 + 5]);
    }
  }
}

TEST_F(GptOss, AShardHoldsItsExpertsAlone) {
  const GptOssModel model;
  const Tokens tokens(model.shape());
  LoadMoeOptions options;
  options.expert_offset = 2;
  options.local_experts = 3;
  const LoadedMoe shard = load(model.tensors(GptOssNames::kHuggingFace),
                               model.config_text(GptOssNames::kHuggingFace), options);
  EXPECT_EQ(shard.config().local_experts, 3);
  const GptOssLayer& layer = model.layer(0);
  const size_t expert = layer.w1.size() / 6;
  EXPECT_EQ(std::memcmp(shard.weights().w1.values.data, layer.w1.data() + 2 * expert, 3 * expert),
            0);
  ASSERT_EQ(to_string(shard.weights().bias2), "F32[3, 96]");
  EXPECT_EQ(float_bits(static_cast<const float*>(shard.weights().bias2.data)[100]) >> 16,
            layer.bias2[2 * 96 + 100]);
  // Only slots of its experts count: with the others' output the sum is that of all.
  const auto sums = [&](int32_t offset, int32_t count) {
    LoadMoeOptions part;
    part.expert_offset = offset;
    part.local_experts = count;
    const LoadedMoe loaded(Checkpoint(dir_.string()), 0, part);
    return as_floats(run(loaded.weights(), loaded.config(), tokens), DType::kF32);
  };
  std::vector<float> sum = sums(0, 2);
  const std::vector<float> rest = sums(2, 4);
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += rest[i];
  EXPECT_LT(distance(sum, sums(0, 6), 96).rel, 1e-6);
  EXPECT_EQ(shard.stored_bytes(),
            (layer.w1.size() + layer.w1_scales.size() + layer.w2.size() + layer.w2_scales.size() +
             2 * (layer.bias1.size() + layer.bias2.size())) /
                2);
}

TEST_F(GptOss, OtherExpertsAreNotRead) {
  if (bytes_read() == 0) GTEST_SKIP() << "/proc/self/io is not readable";
  const GptOssModel model;
  for (const bool is_plain : {false, true}) {
    (void)load(is_plain ? model.plain_tensors(GptOssNames::kHuggingFace)
                        : model.tensors(GptOssNames::kHuggingFace),
               model.config_text(GptOssNames::kHuggingFace, !is_plain));
    const Checkpoint checkpoint(dir_.string());
    LoadMoeOptions options;
    options.expert_offset = 4;
    options.local_experts = 1;
    const uint64_t before = bytes_read();
    const LoadedMoe loaded(checkpoint, 1, options);
    const uint64_t read = bytes_read() - before;
    EXPECT_GE(read, loaded.stored_bytes());
    // The router, and the counters.
    EXPECT_LT(read, loaded.stored_bytes() + 6 * 96 * 2 + 4096);
    EXPECT_LT(read, checkpoint.shards()[0].file_size() / 8);
  }
}

// 160 columns are five blocks of 32.
TEST_F(GptOss, TensorRanksHoldAndReadTheirPartAlone) {
  const GptOssModel model;
  const Tokens tokens(model.shape());
  const auto output = [&](const LoadedMoe& loaded) {
    MoeConfig config = loaded.config();
    config.slot_dtype = DType::kF32;
    return as_floats(run(loaded.weights(), config, tokens), DType::kF32);
  };
  for (const GptOssNames names : {GptOssNames::kHuggingFace, GptOssNames::kOriginal}) {
    for (const bool is_plain : {false, true}) {
      const LoadedMoe whole = load(is_plain ? model.plain_tensors(names) : model.tensors(names),
                                   model.config_text(names, !is_plain));
      const Checkpoint checkpoint(dir_.string());
      std::vector<float> sum(static_cast<size_t>(kGptOssTokens * tokens.hidden));
      uint64_t stored_bytes = 0;
      LoadMoeOptions options;
      options.tensor_ranks = 5;
      (void)LoadedMoe(checkpoint, 0, options);  // Threads read files when they start.
      for (options.tensor_rank = 0; options.tensor_rank < 5; ++options.tensor_rank) {
        const uint64_t before = bytes_read();
        const LoadedMoe part(checkpoint, 0, options);
        const uint64_t read = bytes_read() - before;
        expect_tensor_shard(whole, part, options.tensor_rank, 5);
        stored_bytes += part.stored_bytes();
        if (read > 0) {
          // The router's weight and bias, and the counters.
          EXPECT_GE(read, part.stored_bytes() + 6 * 97 * 2);
          EXPECT_LT(read, part.stored_bytes() + 6 * 97 * 2 + 1024);
        }
        const std::vector<float> out = output(part);
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += out[i];
      }
      EXPECT_EQ(stored_bytes, whole.stored_bytes());
      // Each rank's part of a row of the second GEMM is summed on its own.
      EXPECT_LT(distance(sum, output(whole), 96).rel, 1e-6);
    }
  }
}

TEST_F(GptOss, TensorRanksMustFitTheBlocks) {
  EXPECT_EQ(tensor_shard(2880, MoeMode::kMxfp4Bf16, 2, 9).offset, 640);
  EXPECT_EQ(tensor_shard(2880, MoeMode::kMxfp4Bf16, 2, 9).count, 320);
  const auto refused = [](const std::vector<std::string>& words, int64_t inter, MoeMode mode,
                          int rank, int ranks) {
    expect_error(ErrorKind::kInvalidArgument, words,
                 [&] { (void)tensor_shard(inter, mode, rank, ranks); });
  };
  refused({"tensor_ranks", "multiples of 32", "1, 2, 3, 5, 6, 9, 10, 15, 18, 30, 45, 90", "got 8"},
          2880, MoeMode::kMxfp4Bf16, 0, 8);
  refused({"tensor_ranks", "got 0"}, 2880, MoeMode::kMxfp4Bf16, 0, 0);
  refused({"tensor_rank", "0 to 1", "got 2"}, 2880, MoeMode::kMxfp4Bf16, 2, 2);
  refused({"tensor_rank", "0 to 1", "got -1"}, 2880, MoeMode::kMxfp4Bf16, -1, 2);
  refused({"inter", "fp8_block", "128", "got 2880"}, 2880, MoeMode::kFp8Block, 0, 1);
  for (const MoeModeInfo& mode : all_moe_modes()) {
    EXPECT_EQ(tensor_shard(2 * mode.multiple, mode.id, 1, 2).offset, mode.multiple);
  }
  const GptOssModel model;
  LoadMoeOptions options;
  options.tensor_ranks = 2;
  expect_error(ErrorKind::kInvalidArgument, {"tensor_ranks", "160", "one of 1, 5 ranks", "got 2"},
               [&] {
                 (void)load(model.tensors(GptOssNames::kHuggingFace),
                            model.config_text(GptOssNames::kHuggingFace), options);
               });
}

TEST_F(GptOss, PlainExpertsAreTheDecodedOnes) {
  const GptOssModel model({.hidden = 96, .inter = 96, .experts = 4, .top_k = 2}, 5);
  const Tokens tokens(model.shape());
  MoeConfig exact = model.config();
  const std::vector<float> wanted =
      as_floats(run(model.layer(0).weights(model.shape()), exact, tokens), DType::kF32);
  for (const GptOssNames names : {GptOssNames::kHuggingFace, GptOssNames::kOriginal}) {
    const LoadedMoe loaded = load(model.plain_tensors(names), model.config_text(names, false));
    EXPECT_EQ(loaded.stored_format(), WeightFormat::kBf16);
    EXPECT_EQ(loaded.config().mode, MoeMode::kBf16);
    const std::vector<float> out =
        as_floats(run(loaded.weights(), loaded.config(), tokens), DType::kF32);
    EXPECT_LT(distance(out, wanted, 96).rel, 3e-3);
    // Quantized to MXFP4 again, with rules of their own, by any mode.
    LoadMoeOptions options;
    options.mode = MoeMode::kMxfp8;
    const LoadedMoe again(Checkpoint(dir_.string()), 0, options);
    EXPECT_LT(
        distance(as_floats(run(again.weights(), again.config(), tokens), DType::kF32), wanted, 96)
            .rel,
        0.1);
  }
}

TEST_F(GptOss, RefusesLayersThatAreNotWhole) {
  const GptOssModel model;
  const std::string config = model.config_text(GptOssNames::kHuggingFace);
  const auto without = [&](const std::string& part) {
    std::vector<FileTensor> tensors;
    for (FileTensor& tensor : model.tensors(GptOssNames::kHuggingFace)) {
      if (tensor.spec.name.find(part) == std::string::npos) tensors.push_back(std::move(tensor));
    }
    return tensors;
  };
  expect_error(ErrorKind::kCorruptData, {"gate_up_proj", "down matrices", "lack"},
               [&] { (void)load(without("layers.0.mlp.experts.down_proj"), config); });
  expect_error(ErrorKind::kCorruptData, {"down_proj", "gate and up matrices", "lack"},
               [&] { (void)load(without("layers.0.mlp.experts.gate_up_proj"), config); });
  expect_error(ErrorKind::kCorruptData, {"misses its companion", "down_proj_scales"},
               [&] { (void)load(without("layers.0.mlp.experts.down_proj_scales"), config); });
  expect_error(ErrorKind::kCorruptData, {"router's", "mlp.router.bias", "[6]"},
               [&] { (void)load(without("layers.0.mlp.router.bias"), config); });
  expect_error(ErrorKind::kCorruptData, {"expected the router"},
               [&] { (void)load(without("layers.0.mlp.router.weight"), config); });
  // Biases are optional, as elsewhere.
  const LoadedMoe unbiased = load(without("proj_bias"), config);
  EXPECT_TRUE(unbiased.weights().bias1.is_absent());
}

TEST_F(GptOss, RefusesWhatDoesNotFit) {
  const GptOssModel model;
  const std::string config = model.config_text(GptOssNames::kHuggingFace);
  const auto reshaped = [&](const std::string& name, const std::vector<int64_t>& shape) {
    std::vector<FileTensor> tensors = model.tensors(GptOssNames::kHuggingFace);
    for (FileTensor& tensor : tensors) {
      if (tensor.spec.name == "model.layers.0.mlp." + name) tensor.spec.shape = shape;
    }
    return tensors;
  };
  expect_error(ErrorKind::kCorruptData, {"gate_up_proj_bias", "[6, 320]", "[3, 640]"}, [&] {
    (void)load(reshaped("experts.gate_up_proj_bias", {3, 640}), config);
  });
  expect_error(ErrorKind::kCorruptData, {"router.bias", "[6]", "[2, 3]"}, [&] {
    (void)load(reshaped("router.bias", {2, 3}), config);
  });
  // Five experts in config.json, six in the file.
  expect_error(ErrorKind::kCorruptData, {"experts 0 to 5", "declares 5"}, [&] {
    (void)load(model.tensors(GptOssNames::kHuggingFace),
               R"({"model_type": "gpt_oss", "num_local_experts": 5, "num_experts_per_tok": 2})");
  });
  // Matrices of different models.
  const GptOssModel other({.hidden = 96, .inter = 96, .experts = 6, .top_k = 2});
  std::vector<FileTensor> mixed = model.tensors(GptOssNames::kHuggingFace);
  for (const FileTensor& tensor : other.tensors(GptOssNames::kHuggingFace)) {
    for (FileTensor& mine : mixed) {
      if (mine.spec.name.find("down_proj_") != std::string::npos &&
          mine.spec.name == tensor.spec.name) {
        mine = tensor;
      }
    }
  }
  expect_error(ErrorKind::kCorruptData, {"do not fit together", "6 of 96 x 96"},
               [&] { (void)load(mixed, config); });
}

TEST_F(GptOss, RefusesWhatCannotBeComputed) {
  const GptOssModel model;
  const std::vector<FileTensor> tensors = model.tensors(GptOssNames::kHuggingFace);
  expect_error(ErrorKind::kUnsupported, {"gate_up_proj", "stacked experts", "llama4_text"}, [&] {
    (void)load(tensors,
               R"({"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2})");
  });
  LoadMoeOptions options;
  options.mode = MoeMode::kNvfp4Bf16;
  expect_error(ErrorKind::kInvalidArgument, {"mode", "stored as mxfp4"},
               [&] { (void)load(tensors, model.config_text(GptOssNames::kHuggingFace), options); });
  std::vector<FileTensor> twice = tensors;
  twice.push_back({{"model.layers.0.mlp.experts.0.up_proj.weight", DType::kU8, {1}}, {0}});
  expect_error(ErrorKind::kCorruptData, {"one by one and stacked"},
               [&] { (void)load(twice, model.config_text(GptOssNames::kHuggingFace)); });
  // Plain experts of integers, and experts that are one matrix.
  std::vector<FileTensor> plain = model.plain_tensors(GptOssNames::kHuggingFace);
  for (FileTensor& tensor : plain) {
    if (tensor.spec.name.ends_with("gate_up_proj")) tensor.spec.dtype = DType::kI16;
  }
  const std::string config = model.config_text(GptOssNames::kHuggingFace, false);
  expect_error(ErrorKind::kUnsupported, {"gate_up_proj", "F32, BF16 or F16", "I16"},
               [&] { (void)load(plain, config); });
  for (FileTensor& tensor : plain) {
    if (tensor.spec.name.ends_with("gate_up_proj")) tensor.spec.shape = {6 * 96, 320};
  }
  expect_error(ErrorKind::kCorruptData, {"gate_up_proj", "matrices of all experts", "2 axes"},
               [&] { (void)load(plain, config); });
}

}  // namespace
}  // namespace narrowfloat::testing
