// Layers of the small trained model: every mode from bf16 weights, and every quantized convention.
#include "narrowfloat/moe_checkpoint.h"

#include <cstring>
#include <fstream>

#include <gtest/gtest.h>

#include "base/float_ops.h"
#include "support/expect_error.h"
#include "support/moe_case.h"
#include "support/temp_dir.h"
#include "support/trained_layer.h"

namespace narrowfloat::testing {
namespace {

const std::string kModel = trained_model();
constexpr int64_t kRecordedTokens = 96;

RecordedTokens recorded(int64_t layer) { return recorded_tokens(layer, kRecordedTokens); }

MoeConfig config_with_fp32_out(const LoadedMoe& loaded) {
  MoeConfig config = loaded.config();
  config.out_dtype = DType::kF32;
  return config;
}
std::vector<float> run_loaded(const LoadedMoe& loaded, const RecordedTokens& recorded) {
  return run_layer(MoeLayer::prepare(loaded.weights(), config_with_fp32_out(loaded)), recorded);
}
std::vector<float> run_in_fp64(const LoadedMoe& loaded, const RecordedTokens& recorded) {
  return run_layer(MoeLayer::prepare_reference(loaded.weights(), config_with_fp32_out(loaded),
                                               {.accumulation = Accumulation::kFp64}),
                   recorded);
}

class TrainedModel : public ::testing::TestWithParam<MoeMode> {};
INSTANTIATE_TEST_SUITE_P(Moe, TrainedModel, ::testing::ValuesIn(every_moe_mode()), mode_test_name);

TEST_P(TrainedModel, StaysCloseToTheUnquantizedLayer) {
  const Checkpoint checkpoint(kModel);
  const RecordedTokens data = recorded(1);
  const std::vector<float> reference = run_unquantized(1, data);
  const LoadedMoe loaded(checkpoint, 1, options_for(GetParam()));
  const std::vector<float> out = run_loaded(loaded, data);
  const Distance loss = distance(out, reference, 256);
  RecordProperty("rel", std::to_string(loss.rel));
  EXPECT_LT(loss.rel, loss_bound(GetParam()));
  if (GetParam() != MoeMode::kBf16) {
    EXPECT_GT(loss.rel, 0.005);
  }
}

TEST_P(TrainedModel, Fp32SumsAreCloseToTheReference) {
  const Checkpoint checkpoint(kModel);
  const RecordedTokens data = recorded(2);
  const LoadedMoe loaded(checkpoint, 2, options_for(GetParam()));
  const std::vector<float> reference = run_in_fp64(loaded, data);
  const Distance apart = distance(run_loaded(loaded, data), reference, 256);
  // End to end, moe spec 12.3: a sum's last bit may move a value over a rounding boundary.
  EXPECT_LT(apart.rel, 3e-3);
  EXPECT_LT(apart.row, 3e-2);
}

TEST(LoadedMoe, Bf16IsWhatTheTrainingFrameworkComputed) {
  const Checkpoint checkpoint(kModel);
  for (int64_t layer = 0; layer < 4; ++layer) {
    const RecordedTokens data = recorded(layer);
    const LoadedMoe loaded(checkpoint, layer);
    const std::vector<float> out = run_loaded(loaded, data);
    const std::vector<float> theirs = as_floats(data.output, DType::kBF16);
    // That inference rounds every step to bf16: 0.32 to 0.38 % from fp32 (models/tiny-moe).
    EXPECT_LT(distance(theirs, out, 256).rel, 5e-3) << "layer " << layer;
  }
}

TEST(LoadedMoe, FindsLayersShapeAndRouter) {
  const Checkpoint checkpoint(kModel);
  EXPECT_EQ(moe_layers(checkpoint), (std::vector<int64_t>{0, 1, 2, 3}));
  const LoadedMoe loaded(checkpoint, 3);
  EXPECT_EQ(loaded.config().hidden, 256);
  EXPECT_EQ(loaded.config().inter, 128);
  EXPECT_EQ(loaded.config().routing.experts, 16);
  EXPECT_EQ(loaded.config().routing.top_k, 2);
  EXPECT_EQ(loaded.config().routing.method, RoutingMethod::kRenormalize);
  EXPECT_EQ(loaded.config().mode, MoeMode::kBf16);
  EXPECT_EQ(loaded.stored_bytes(), 16U * 3 * 128 * 256 * 2);
  // The router reproduces the recorded logits.
  const RecordedTokens data = recorded(3);
  const auto* router = static_cast<const float*>(loaded.router_weight().data);
  const std::vector<float> x =
      as_floats({reinterpret_cast<const uint8_t*>(data.x.data()),
                 reinterpret_cast<const uint8_t*>(data.x.data() + data.x.size())},
                DType::kBF16);
  for (size_t expert = 0; expert < 16; ++expert) {
    double logit = 0;
    for (size_t i = 0; i < 256; ++i) {
      logit += static_cast<double>(router[expert * 256 + i]) * static_cast<double>(x[i]);
    }
    EXPECT_NEAR(logit, static_cast<double>(data.logits[expert]), 1e-4);
  }
}

// Prepared weights take as many bytes as the mode's bits say.
TEST_P(TrainedModel, PreparedWeightsDoNotGrow) {
  const Checkpoint checkpoint(kModel);
  const LoadedMoe loaded(checkpoint, 0, options_for(GetParam()));
  const MoeLayer layer = MoeLayer::prepare(loaded.weights(), loaded.config());
  const double expected = 16 * 3 * 128 * 256 * moe_mode_info(GetParam()).bits_per_weight / 8;
  EXPECT_LE(static_cast<double>(layer.weight_bytes()), 1.05 * expected);
  EXPECT_GE(static_cast<double>(layer.weight_bytes()), 0.99 * expected);
}

struct Stored {
  Convention convention;
  WeightFormat format;
  MoeMode mode;
  MoeMode default_mode;
};

TEST(LoadedMoe, ReadsEveryConventionAsTheCodesItStores) {
  const Checkpoint plain(kModel);
  const RecordedTokens data = recorded(0);
  for (const Stored& stored : {Stored{Convention::kNvfp4CompressedTensors, WeightFormat::kNvfp4,
                                      MoeMode::kNvfp4PerToken, MoeMode::kNvfp4Bf16},
                               Stored{Convention::kNvfp4ModelOpt, WeightFormat::kNvfp4,
                                      MoeMode::kNvfp4Fp8Exact, MoeMode::kNvfp4Bf16},
                               Stored{Convention::kMxfp4CompressedTensors, WeightFormat::kMxfp4,
                                      MoeMode::kMxfp4Mxfp8, MoeMode::kMxfp4Bf16},
                               Stored{Convention::kMxfp8CompressedTensors, WeightFormat::kMxfp8,
                                      MoeMode::kMxfp8, MoeMode::kMxfp8},
                               Stored{Convention::kFp8Block, WeightFormat::kFp8Block,
                                      MoeMode::kFp8Block, MoeMode::kFp8Block}}) {
    const std::string name(convention_info(stored.convention).name);
    SCOPED_TRACE(name);
    const TempDir base;
    const std::string coded_dir = base / name;
    const std::string plain_dir = base / (name + "-plain");
    QuantizeCheckpointOptions to;
    to.to = stored.convention;
    to.force = true;
    to.measure = false;
    quantize_checkpoint(kModel, coded_dir, to);
    DequantizeCheckpointOptions back;
    back.dtype = DType::kF32;
    back.force = true;
    dequantize_checkpoint(coded_dir, plain_dir, back);

    const Checkpoint coded(coded_dir);
    const LoadedMoe by_default(coded, 0);
    EXPECT_EQ(by_default.stored_format(), stored.format);
    EXPECT_EQ(by_default.config().mode, stored.default_mode);
    LoadMoeOptions options;
    options.mode = stored.mode;
    const LoadedMoe loaded(coded, 0, options);
    EXPECT_LT(loaded.stored_bytes(), plain.find("model.layers.0.mlp.gate.weight") == nullptr
                                         ? 0U
                                         : 16U * 3 * 128 * 256 * 2);
    // The same values in bf16: only activations are quantized differently.
    const Checkpoint decoded(plain_dir);
    const LoadedMoe reference(decoded, 0);
    const double apart = distance(run_loaded(loaded, data), run_in_fp64(reference, data), 256).rel;
    EXPECT_LT(apart, stored.mode == MoeMode::kNvfp4PerToken ? 0.15 : 0.05);
    expect_error(ErrorKind::kInvalidArgument, {"mode", "stored as"}, [&] {
      LoadMoeOptions other;
      other.mode =
          stored.format == WeightFormat::kMxfp4 ? MoeMode::kNvfp4Bf16 : MoeMode::kMxfp4Bf16;
      const LoadedMoe refused(coded, 0, other);
    });
  }
}

TEST(LoadedMoe, ShardsHoldTheirExperts) {
  const Checkpoint checkpoint(kModel);
  const LoadedMoe whole(checkpoint, 0);
  LoadMoeOptions options;
  options.expert_offset = 5;
  options.local_experts = 3;
  const LoadedMoe shard(checkpoint, 0, options);
  EXPECT_EQ(shard.config().expert_offset, 5);
  EXPECT_EQ(shard.config().local_experts, 3);
  const auto* all = static_cast<const uint8_t*>(whole.weights().w1.values.data);
  const size_t expert_bytes = 2 * 128 * 256 * 2;
  EXPECT_EQ(std::memcmp(shard.weights().w1.values.data, all + 5 * expert_bytes, 3 * expert_bytes),
            0);
}

TEST(LoadedMoe, RefusesWhatDoesNotFit) {
  const Checkpoint checkpoint(kModel);
  const auto load = [&](int64_t layer, const LoadMoeOptions& options) {
    const LoadedMoe loaded(checkpoint, layer, options);
  };
  expect_error(ErrorKind::kInvalidArgument, {"layer 4", "0, 1, 2, 3"}, [&] { load(4, {}); });
  LoadMoeOptions options;
  options.mode = MoeMode::kNvfp4;
  expect_error(ErrorKind::kInvalidArgument, {"input_amax"}, [&] { load(0, options); });
  options.input_amax = -1.0F;
  expect_error(ErrorKind::kInvalidArgument, {"input_amax", "-1"}, [&] { load(0, options); });
  options = {};
  options.expert_offset = 14;
  options.local_experts = 3;
  expect_error(ErrorKind::kInvalidArgument, {"local_experts", "16"}, [&] { load(0, options); });
}

// A model of one layer with two experts of 32 x 16.
class SmallModel {
 public:
  // router_bias: experts of the correction bias; 0 leaves it out. without: a tensor to leave out.
  explicit SmallModel(std::vector<TensorSpec> extra, std::vector<int64_t> gate_shape = {32, 16},
                      int64_t router_bias = 2, const std::string& without = "") {
    std::ofstream(dir_ / "config.json")
        << R"({"model_type": "deepseek_v3", "n_routed_experts": 2, "num_experts_per_tok": 1,
              "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5})";
    std::vector<TensorSpec> tensors = std::move(extra);
    tensors.push_back({"model.layers.0.mlp.gate.weight", DType::kF32, {2, 16}});
    for (const std::string expert : {"0", "1"}) {
      const std::string stem = "model.layers.0.mlp.experts." + expert + ".";
      tensors.push_back({stem + "gate_proj.weight", DType::kBF16, gate_shape});
      tensors.push_back({stem + "up_proj.weight", DType::kBF16, {32, 16}});
      tensors.push_back({stem + "down_proj.weight", DType::kBF16, {16, 32}});
    }
    if (router_bias > 0) {
      tensors.push_back(
          {"model.layers.0.mlp.gate.e_score_correction_bias", DType::kF32, {router_bias}});
    }
    std::erase_if(tensors, [&](const TensorSpec& tensor) { return tensor.name == without; });
    SafetensorsWriter writer(dir_ / "model.safetensors", tensors, {});
    for (size_t i = 0; i < tensors.size(); ++i) {
      const auto size = static_cast<size_t>(bits(tensors[i].dtype) / 8);
      size_t count = 1;
      for (const int64_t extent : tensors[i].shape) count *= static_cast<size_t>(extent);
      std::vector<uint8_t> data(count * size);
      // The upper halves of value(i, j).
      for (size_t j = 0; j < count; ++j) {
        data[j * size + size - 1] = 0x40;
        data[j * size + size - 2] = static_cast<uint8_t>(16 * i + j % 16);
      }
      writer.write(tensors[i].name, 0, std::as_bytes(std::span(data)));
    }
    writer.commit();
  }
  [[nodiscard]] Checkpoint open() const { return Checkpoint(dir_.path()); }
  // Element j of tensor i.
  static float value(uint32_t i, uint32_t j) {
    return bits_float(0x40000000U | ((16 * i + j % 16) << 16));
  }

 private:
  TempDir dir_;
};

TEST(LoadedMoe, NamesWhatAnExpertLacks) {
  const std::string mlp = "model.layers.0.mlp.";
  const std::pair<std::string, std::string> cases[] = {
      {"experts.1.up_proj.weight", "expert 1 lacks its up matrix"},
      {"experts.0.gate_proj.weight", "expert 0 lacks its gate matrix"},
      {"experts.1.down_proj.weight", "expert 1 lacks its down matrix"},
      {"gate.weight", "gate.weight"},
  };
  for (const auto& [missing, message] : cases) {
    const SmallModel model({}, {32, 16}, 2, mlp + missing);
    expect_error(ErrorKind::kCorruptData, {"model.layers.0.mlp", message},
                 [&] { const LoadedMoe loaded(model.open(), 0); });
  }
}

TEST(LoadedMoe, ReadsBiasesBesideTheWeights) {
  const std::string experts = "model.layers.0.mlp.experts.";
  const SmallModel model({{experts + "0.gate_proj.bias", DType::kBF16, {32}},
                          {experts + "1.up_proj.bias", DType::kF32, {32}},
                          {experts + "1.down_proj.bias", DType::kBF16, {16}}});
  const LoadedMoe loaded(model.open(), 0);
  ASSERT_EQ(to_string(loaded.weights().bias1), "F32[2, 64]");
  ASSERT_EQ(to_string(loaded.weights().bias2), "F32[2, 16]");
  const auto* bias1 = static_cast<const float*>(loaded.weights().bias1.data);
  const auto* bias2 = static_cast<const float*>(loaded.weights().bias2.data);
  for (uint32_t j = 0; j < 32; ++j) {
    EXPECT_EQ(bias1[j], SmallModel::value(0, j)) << "gate of expert 0";
    EXPECT_EQ(bias1[32 + j], 0.0F) << "up of expert 0";
    EXPECT_EQ(bias1[64 + j], 0.0F) << "gate of expert 1";
    EXPECT_EQ(bias1[96 + j], SmallModel::value(1, j)) << "up of expert 1";
  }
  for (uint32_t j = 0; j < 16; ++j) {
    EXPECT_EQ(bias2[j], 0.0F);
    EXPECT_EQ(bias2[16 + j], SmallModel::value(2, j));
  }
  EXPECT_EQ(loaded.stored_bytes(), 2U * 3 * 32 * 16 * 2 + 32 * 2 + 32 * 4 + 16 * 2);
  // A shard has its own experts' biases.
  LoadMoeOptions options;
  options.expert_offset = 1;
  const LoadedMoe shard(model.open(), 0, options);
  ASSERT_EQ(to_string(shard.weights().bias1), "F32[1, 64]");
  EXPECT_EQ(static_cast<const float*>(shard.weights().bias1.data)[32], SmallModel::value(1, 0));
  (void)MoeLayer::prepare(shard.weights(), shard.config());
}

TEST(LoadedMoe, HasNoBiasesWhereTheModelHasNone) {
  const SmallModel model({});
  const LoadedMoe loaded(model.open(), 0);
  EXPECT_TRUE(loaded.weights().bias1.is_absent());
  EXPECT_TRUE(loaded.weights().bias2.is_absent());
}

TEST(LoadedMoe, RefusesTensorsOfWrongShapes) {
  const auto refuses = [](const SmallModel& model, const std::vector<std::string>& fragments) {
    expect_error(ErrorKind::kCorruptData, fragments,
                 [&] { const LoadedMoe loaded(model.open(), 0); });
  };
  refuses(SmallModel({}, {512}), {"gate_proj.weight", "a matrix", "1 axes"});
  refuses(SmallModel({{"model.layers.0.mlp.experts.1.up_proj.bias", DType::kBF16, {31}}}),
          {"1.up_proj.bias", "[32]", "[31]"});
  refuses(SmallModel({}, {32, 16}, 3), {"e_score_correction_bias", "[2]", "[3]"});
  refuses(SmallModel({}, {32, 16}, 0), {"e_score_correction_bias"});
}

}  // namespace
}  // namespace narrowfloat::testing
