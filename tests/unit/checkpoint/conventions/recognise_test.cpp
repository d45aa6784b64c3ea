// Recognition by declaration, dtypes and shapes, and every way in which they can disagree.
#include "checkpoint/conventions/convention.h"
#include "unit/checkpoint/test_files.h"

namespace narrowfloat {
namespace {

constexpr int64_t kRows = 8;
constexpr int64_t kCols = 64;

// A directory with one quantized module "a.fc" and a config.
class Recognise : public ::testing::Test {
 protected:
  void write(const std::vector<TensorSpec>& tensors,
             const std::map<std::string, std::string>& metadata = {}) {
    SafetensorsWriter writer(dir_ / "model.safetensors", tensors, metadata);
    for (const TensorSpec& tensor : tensors) {
      int64_t size = bits(tensor.dtype) / 8;
      for (const int64_t extent : tensor.shape) size *= extent;
      writer.write(tensor.name, 0, std::vector<std::byte>(static_cast<size_t>(size)));
    }
    writer.commit();
  }
  void declare(const std::string& quantization_config) {
    write_file(dir_ / "config.json", "{\"quantization_config\": " + quantization_config + "}");
  }
  void declare(Convention convention) {
    declare(convention_spec(convention).quantization_config({}).dump());
  }
  std::vector<LogicalTensor> recognised() const { return recognise(Checkpoint(dir_.path())); }
  void expect_corrupt(std::string_view part) const {
    expect_error(ErrorKind::kCorruptData, part, [&] { recognised(); });
  }

  TempDir dir_;
};

std::vector<TensorSpec> parts_of(Convention convention) {
  return stored_parts(convention_spec(convention), "a.fc.", kRows, kCols);
}

const std::vector<TensorSpec> kMixedParts = {
    {"a.fc.weight_packed", DType::kU8, {kRows, kCols / 2}},
    {"a.fc.weight_scale", DType::kU8, {kRows, kCols / 32}},
};

TEST_F(Recognise, EveryConventionWithAndWithoutItsDeclaration) {
  for (const ConventionInfo& info : all_conventions()) {
    if (!info.is_written) continue;
    write(parts_of(info.id));
    for (const bool is_declared : {true, false}) {
      std::filesystem::remove(dir_ / "config.json");
      if (is_declared) declare(info.id);
      const std::vector<LogicalTensor> tensors = recognised();
      ASSERT_EQ(tensors.size(), 1U) << info.name;
      EXPECT_EQ(tensors[0].name, "a.fc.weight");
      // Without a declaration, tensors of two conventions are read as those of compressed-tensors.
      const bool is_twin = convention_spec(info.id).needs_declaration && !is_declared;
      const ConventionSpec* wanted =
          is_twin ? companion_of(compressed_tensors_nvfp4(), convention_spec(info.id))
                  : &convention_spec(info.id);
      EXPECT_EQ(tensors[0].convention, wanted->info.id) << info.name;
      EXPECT_EQ(tensors[0].shape, (std::vector<int64_t>{kRows, kCols}));
      EXPECT_EQ(tensors[0].parts.size(), parts_of(info.id).size());
    }
  }
}

TEST_F(Recognise, BitsPerElementCountAllParts) {
  write(parts_of(Convention::kNvfp4CompressedTensors));
  const LogicalTensor weight = recognised().at(0);
  EXPECT_EQ(weight.num_elements(), kRows * kCols);
  EXPECT_DOUBLE_EQ(weight.bits_per_element(), 4.5 + 32.0 / (kRows * kCols));
}

TEST_F(Recognise, PlainTensorsStayPlain) {
  write({{"a.fc.weight", DType::kBF16, {4, 4}},
         {"b.weight", DType::kF8E4M3, {4, 4}},
         {"c.weight", DType::kU8, {4}}});
  for (const LogicalTensor& tensor : recognised()) {
    EXPECT_FALSE(tensor.convention.has_value()) << tensor.name;
    EXPECT_EQ(tensor.parts, std::vector<std::string>{tensor.name});
  }
}

TEST_F(Recognise, ActivationScalesArePartsOfTheirWeight) {
  std::vector<TensorSpec> tensors = parts_of(Convention::kNvfp4ModelOpt);
  tensors.push_back({"a.fc.input_scale", DType::kF32, {}});
  write(tensors);
  declare(R"({"quant_method": "modelopt", "quant_algo": "NVFP4"})");
  EXPECT_EQ(recognised().at(0).parts.back(), "a.fc.input_scale");
}

TEST_F(Recognise, ReadsOtherSpellingsOfTheSameTensors) {
  write({{"a.fc.weight", DType::kF8E4M3, {kRows, kCols}},
         {"a.fc.weight_scale", DType::kF8E8M0, {kRows, 2}}});
  for (const char* config : {R"({"quant_method": "modelopt", "quant_algo": "MXFP8"})",
                             R"({"quant_method": "mxfp8", "weight_block_size": [1, 32]})"}) {
    declare(config);
    EXPECT_EQ(recognised().at(0).convention, Convention::kMxfp8CompressedTensors) << config;
  }
}

TEST_F(Recognise, FindsDeclarationsInNestedConfigsAndFiles) {
  write(kMixedParts);
  write_file(dir_ / "config.json",
             R"({"text_config": {"quantization_config":
                 {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}}})");
  EXPECT_EQ(recognised().at(0).convention, Convention::kMxfp4CompressedTensors);
  write_file(dir_ / "config.json", "{}");
  write_file(dir_ / "hf_quant_config.json", R"({"quantization": {"quant_algo": "NVFP4"}})");
  expect_corrupt("hf_quant_config.json declares nvfp4-modelopt");
}

TEST_F(Recognise, ContradictingDeclarationsNameBoth) {
  write(kMixedParts, {{"narrowfloat.convention", "nvfp4-ct"}});
  declare(Convention::kMxfp4CompressedTensors);
  expect_corrupt(
      "declarations contradict each other: config.json says mxfp4-ct (compressed-tensors, format "
      "mxfp4-pack-quantized)");
}

TEST_F(Recognise, ADeclarationMustFitTheTensors) {
  write(kMixedParts);
  declare(Convention::kNvfp4CompressedTensors);
  expect_corrupt(
      "tensor 'a.fc.weight_packed' U8 [8, 32]: config.json declares nvfp4-ct (compressed-tensors, "
      "format nvfp4-pack-quantized), but with its companions it is mxfp4-ct");
}

TEST_F(Recognise, MissingCompanionsAreNamed) {
  for (const ConventionInfo& info : all_conventions()) {
    if (!info.is_written) continue;
    std::vector<TensorSpec> tensors = parts_of(info.id);
    const TensorSpec missing = tensors.at(1);
    tensors.erase(tensors.begin() + 1);
    write(tensors);
    declare(info.id);
    expect_corrupt("misses its companion '" + missing.name + "'");
  }
  write({kMixedParts[0]});
  std::filesystem::remove(dir_ / "config.json");
  expect_corrupt("misses its companion 'a.fc.weight_scale'");
}

TEST_F(Recognise, WrongCompanionsAreNamed) {
  for (const ConventionInfo& info : all_conventions()) {
    if (!info.is_written) continue;
    std::vector<TensorSpec> tensors = parts_of(info.id);
    tensors[1].shape = {5, 7};
    write(tensors);
    declare(info.id);
    expect_corrupt("got '" + tensors[1].name + "' ");
  }
  std::filesystem::remove(dir_ / "config.json");
  expect_corrupt("the nearest convention is");
}

TEST_F(Recognise, ScalesWithoutCodesAreRefused) {
  std::vector<TensorSpec> tensors = parts_of(Convention::kMxfp8CompressedTensors);
  tensors.push_back({"b.fc.weight_scale", DType::kU8, {8, 2}});
  write(tensors);
  declare(Convention::kMxfp8CompressedTensors);
  expect_corrupt("'b.fc.weight_scale' U8 [8, 2] belongs to 'b.fc.weight', which must be F8_E4M3");
}

TEST_F(Recognise, OneWeightTwiceIsRefused) {
  std::vector<TensorSpec> tensors = kMixedParts;
  tensors.push_back({"a.fc.weight", DType::kBF16, {kRows, kCols}});
  write(tensors);
  expect_corrupt("'a.fc.weight' and 'a.fc.weight_packed' are both there");
}

TEST_F(Recognise, ADeclarationWithoutAnyQuantizedTensorIsRefused) {
  write({{"a.fc.weight", DType::kBF16, {4, 4}}});
  declare(Convention::kFp8Block);
  expect_corrupt(
      "config.json declares fp8-block (fp8, fmt e4m3, weight_block_size [128,128]), but");
}

TEST_F(Recognise, SmallShapesThatFitTwoConventionsNeedADeclaration) {
  write({{"a.fc.weight", DType::kF8E4M3, {1, 32}},
         {"a.fc.weight_scale_inv", DType::kF8E8M0, {1, 1}}});
  expect_corrupt("fits mxfp8-ct and fp8-block; a declaration");
  declare(Convention::kFp8Block);
  EXPECT_EQ(recognised().at(0).convention, Convention::kFp8Block);
}

TEST_F(Recognise, ADeclarationMustAgreeWithItself) {
  write(parts_of(Convention::kNvfp4CompressedTensors));
  const auto expect_refused = [&](const std::string& weights, std::string_view part) {
    declare(R"({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
                "config_groups": {"group_0": {"weights": )" +
            weights + "}}}");
    expect_corrupt(part);
  };
  for (const char* value : {"0", "-1", "1000000000000000000", "32", "\"16\"", "1.5", "[16]"}) {
    expect_refused(std::string(R"({"num_bits": 4, "group_size": )") + value + "}",
                   "'config_groups.group_0.weights.group_size' is");
  }
  for (const char* value : {"1", "8", "\"4\"", "true"}) {
    expect_refused(std::string(R"({"num_bits": )") + value + "}",
                   "'config_groups.group_0.weights.num_bits' is");
  }
  expect_refused(R"({"type": "int"})", "'config_groups.group_0.weights.type' is 'int'");
  expect_refused("[]", "'config_groups.group_0.weights' must be an object");
  declare(
      R"({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
          "config_groups": {"group_0": {"weights": null}, "group_1": 1}})");
  EXPECT_EQ(recognised().size(), 1U);
}

TEST_F(Recognise, UnreadableMethodsListTheReadableOnes) {
  write({{"a.fc.weight", DType::kBF16, {4, 4}}});
  for (const char* config :
       {R"({"quant_method": "gptq"})", R"({"quant_method": "mxfp6"})",
        R"({"quant_method": "fp8", "weight_block_size": [64, 64]})",
        R"({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"})", R"({"quant_method": 5})",
        R"({"quant_method": "compressed-tensors", "format": "marlin-24"})"}) {
    declare(config);
    expect_error(ErrorKind::kUnsupported, "cannot be read; readable are nvfp4-ct, nvfp4-modelopt",
                 [&] { recognised(); });
  }
  std::filesystem::remove(dir_ / "config.json");
  write({{"a.fc.weight", DType::kBF16, {4, 4}}}, {{"narrowfloat.convention", "nvfp3-ct"}});
  expect_error(ErrorKind::kUnsupported, "convention 'nvfp3-ct' cannot be read",
               [&] { recognised(); });
}

TEST_F(Recognise, AnExclusionListAloneDeclaresNothing) {
  write({{"a.fc.weight", DType::kBF16, {4, 4}}});
  declare(R"({"modules_to_not_convert": ["a.fc"]})");
  EXPECT_FALSE(recognised().at(0).convention.has_value());
}

// Stacked experts: E = 3, N = 10, K = 96.
std::vector<TensorSpec> gpt_oss_parts(const std::string& name, const std::string& joint) {
  return {{name + joint + "blocks", DType::kU8, {3, 10, 3, 16}},
          {name + joint + "scales", DType::kU8, {3, 10, 3}}};
}
constexpr const char* kGptOssConfig = R"({"quant_method": "mxfp4"})";
const std::string kGateUp = "model.layers.0.mlp.experts.gate_up_proj";

TEST_F(Recognise, StackedExpertsInBothNamings) {
  for (const bool is_declared : {true, false}) {
    std::filesystem::remove(dir_ / "config.json");
    if (is_declared) declare(kGptOssConfig);
    write(gpt_oss_parts(kGateUp, "_"));
    LogicalTensor weight = recognised().at(0);
    EXPECT_EQ(recognised().size(), 1U);
    EXPECT_EQ(weight.name, kGateUp);
    EXPECT_EQ(weight.convention, Convention::kMxfp4GptOss);
    EXPECT_EQ(weight.shape, (std::vector<int64_t>{3, 96, 10}));  // As the plain weight.
    EXPECT_TRUE(weight.is_transposed);
    EXPECT_DOUBLE_EQ(weight.bits_per_element(), 4.25);
    EXPECT_EQ(weight.parts, (std::vector<std::string>{kGateUp + "_blocks", kGateUp + "_scales"}));
    write(gpt_oss_parts("block.0.mlp.mlp1_weight", "."));
    weight = recognised().at(0);
    EXPECT_EQ(weight.name, "block.0.mlp.mlp1_weight");
    EXPECT_EQ(weight.shape, (std::vector<int64_t>{3, 10, 96}));
    EXPECT_FALSE(weight.is_transposed);
  }
}

TEST_F(Recognise, StackedExpertsAndTheirBiasesAreApart) {
  std::vector<TensorSpec> tensors = gpt_oss_parts(kGateUp, "_");
  tensors.push_back({kGateUp + "_bias", DType::kBF16, {3, 10}});
  write(tensors);
  declare(kGptOssConfig);
  ASSERT_EQ(recognised().size(), 2U);
  EXPECT_EQ(recognised().at(1).name, kGateUp + "_bias");
  EXPECT_FALSE(recognised().at(1).convention.has_value());
}

TEST_F(Recognise, StackedExpertsMustBeWhole) {
  const auto refuse = [&](size_t part, TensorSpec spec, std::string_view message) {
    std::vector<TensorSpec> tensors = gpt_oss_parts(kGateUp, "_");
    tensors[part] = std::move(spec);
    write(tensors);
    declare(kGptOssConfig);
    expect_corrupt(message);
    std::filesystem::remove(dir_ / "config.json");
    expect_corrupt(message);
  };
  refuse(0, {kGateUp + "_blocks", DType::kU8, {3, 10, 48}},
         "must be [experts, rows, columns / 32, 16], got [3, 10, 48]");
  refuse(0, {kGateUp + "_blocks", DType::kU8, {3, 10, 6, 8}}, "columns / 32, 16], got");
  refuse(1, {kGateUp + "_scales", DType::kU8, {3, 10, 4}},
         "needs a companion U8 [3, 10, 3], got 'model.layers.0.mlp.experts.gate_up_proj_scales' U8 "
         "[3, 10, 4]");
  refuse(1, {kGateUp + "_scales", DType::kF32, {3, 10, 3}}, "needs a companion U8 [3, 10, 3]");
  declare(kGptOssConfig);
  write({gpt_oss_parts(kGateUp, "_")[0]});
  expect_corrupt("misses its companion 'model.layers.0.mlp.experts.gate_up_proj_scales' (U8");
  write({gpt_oss_parts(kGateUp, "_")[1]});
  expect_corrupt("declares mxfp4-gpt-oss (mxfp4), but no tensor is stored so");
  // The suffixes of the two namings do not mix.
  write({gpt_oss_parts(kGateUp, "_")[0], gpt_oss_parts(kGateUp, ".")[1]});
  expect_corrupt("misses its companion 'model.layers.0.mlp.experts.gate_up_proj_scales'");
}

TEST_F(Recognise, StackedScalesWithoutCodesAreRefused) {
  std::vector<TensorSpec> tensors = gpt_oss_parts(kGateUp, "_");
  tensors.push_back({"model.layers.0.mlp.experts.down_proj_scales", DType::kU8, {3, 96, 1}});
  write(tensors);
  declare(kGptOssConfig);
  expect_corrupt("belongs to 'model.layers.0.mlp.experts.down_proj_blocks', which must be U8");
}

TEST_F(Recognise, StackedExpertsMustBeTheDeclaredOnes) {
  write(gpt_oss_parts(kGateUp, "_"));
  declare(Convention::kMxfp4CompressedTensors);
  expect_corrupt(
      "declares mxfp4-ct (compressed-tensors, format mxfp4-pack-quantized), but with its "
      "companions it is mxfp4-gpt-oss");
  std::vector<TensorSpec> twice = gpt_oss_parts(kGateUp, "_");
  twice.push_back({kGateUp, DType::kBF16, {3, 96, 10}});
  write(twice);
  declare(kGptOssConfig);
  expect_corrupt("are both there: 'model.layers.0.mlp.experts.gate_up_proj' twice");
  twice = gpt_oss_parts(kGateUp, "_");
  for (const TensorSpec& part : gpt_oss_parts(kGateUp, ".")) twice.push_back(part);
  write(twice);
  expect_corrupt("gate_up_proj.blocks' and 'model.layers.0.mlp.experts.gate_up_proj_blocks' are");
}

TEST_F(Recognise, OtherTensorsOfBlocksStayPlain) {
  write({{"sparse_blocks", DType::kU8, {4, 4}}, {"a_blocks", DType::kU8, {2, 2, 2, 16}}});
  for (const LogicalTensor& tensor : recognised()) EXPECT_FALSE(tensor.convention.has_value());
}

// The largest extent that the reader accepts beside the 16 bytes of a block.
TEST_F(Recognise, EmptyStackedExpertsDoNotOverflow) {
  const int64_t huge = (int64_t{1} << 56) - 1;
  write({{"a_blocks", DType::kU8, {0, 1, huge, 16}}, {"a_scales", DType::kU8, {0, 1, huge}}});
  EXPECT_EQ(recognised().front().shape, (std::vector<int64_t>{0, huge * 32, 1}));
}

}  // namespace
}  // namespace narrowfloat
