// The members that the conventions put into configs; loaders are strict about them.
#include "checkpoint/conventions/convention.h"
#include "unit/checkpoint/test_files.h"

namespace narrowfloat {
namespace {

using nlohmann::json;

const QuantizedModel kModel = {.ignored_modules = {"lm_head", "mlp.gate"}, .writer_version = "1.2"};

json config_of(Convention convention) {
  return convention_spec(convention).quantization_config(kModel);
}

TEST(ConventionConfig, EveryConventionRecognisesItsOwn) {
  for (const ConventionSpec* spec : all_convention_specs()) {
    if (!spec->info.is_written) continue;
    const json config = spec->quantization_config(kModel);
    for (const ConventionSpec* reader : all_convention_specs()) {
      EXPECT_EQ(reader->is_declared_by(config), reader == spec)
          << spec->info.name << " read by " << reader->info.name;
    }
  }
}

TEST(ConventionConfig, CompressedTensorsDescribesWeightsAlone) {
  const json config = config_of(Convention::kNvfp4CompressedTensors);
  EXPECT_EQ(config.at("quant_method"), "compressed-tensors");
  EXPECT_EQ(config.at("quantization_status"), "compressed");
  EXPECT_EQ(config.at("ignore"), json({"lm_head", "mlp.gate"}));
  const json& group = config.at("config_groups").at("group_0");
  EXPECT_EQ(group.at("targets"), json::array({"Linear"}));
  EXPECT_TRUE(group.at("input_activations").is_null());
  EXPECT_EQ(group.at("weights"),
            json::parse(R"({"num_bits": 4, "type": "float", "symmetric": true, "group_size": 16,
                            "strategy": "tensor_group", "dynamic": false,
                            "scale_dtype": "torch.float8_e4m3fn"})"));
}

TEST(ConventionConfig, MxSchemesAreGroupsOf32) {
  for (const auto& [convention, bits] : {std::pair(Convention::kMxfp4CompressedTensors, 4),
                                         std::pair(Convention::kMxfp8CompressedTensors, 8)}) {
    const json weights = config_of(convention).at("config_groups").at("group_0").at("weights");
    EXPECT_EQ(weights.at("strategy"), "group");
    EXPECT_EQ(weights.at("group_size"), 32);
    EXPECT_EQ(weights.at("num_bits"), bits);
    EXPECT_EQ(weights.at("scale_dtype"), "torch.uint8");
  }
}

TEST(ConventionConfig, ModelOptSaysWeightOnlyInBothPlaces) {
  const json config = config_of(Convention::kNvfp4ModelOpt);
  EXPECT_EQ(config.at("quant_algo"), "W4A16_NVFP4");
  EXPECT_FALSE(config.at("config_groups").at("group_0").contains("input_activations"));
  const ConfigFile file = modelopt_nvfp4().extra_config(kModel);
  EXPECT_EQ(file.name, "hf_quant_config.json");
  const json extra = json::parse(file.text);
  EXPECT_EQ(extra.at("producer").at("version"), "1.2");
  EXPECT_EQ(extra.at("quantization").at("quant_algo"), "W4A16_NVFP4");
  EXPECT_EQ(extra.at("quantization").at("group_size"), 16);
  EXPECT_EQ(extra.at("quantization").at("exclude_modules"), json({"lm_head", "mlp.gate"}));
}

TEST(ConventionConfig, ModelOptQuantizesActivationsOfFp8) {
  const json channel = config_of(Convention::kFp8ChannelModelOpt);
  EXPECT_EQ(channel.at("quant_algo"), "FP8_PER_CHANNEL_PER_TOKEN");
  EXPECT_EQ(channel.at("config_groups").at("group_0").at("input_activations").at("dynamic"), true);
  QuantizedModel model = kModel;
  for (const bool has_input_scales : {false, true}) {
    model.has_input_scales = has_input_scales;
    const json config = modelopt_fp8_tensor().quantization_config(model);
    EXPECT_EQ(config.at("quant_algo"), "FP8");
    EXPECT_EQ(config.at("config_groups").at("group_0").contains("input_activations"),
              has_input_scales);
    const json file = json::parse(modelopt_fp8_tensor().extra_config(model).text);
    EXPECT_EQ(file.at("quantization").at("quant_algo"), "FP8");
    EXPECT_FALSE(file.at("quantization").contains("group_size"));
  }
}

TEST(ConventionConfig, DeepSeekListsWhatIsNotConverted) {
  EXPECT_EQ(config_of(Convention::kFp8Block),
            json::parse(R"({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                            "weight_block_size": [128, 128],
                            "modules_to_not_convert": ["lm_head", "mlp.gate"]})"));
}

}  // namespace
}  // namespace narrowfloat
