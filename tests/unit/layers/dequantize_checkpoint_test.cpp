// Dequantizing every convention, with scales in other dtypes and other shards.
#include <nlohmann/json.hpp>

#include "formats/minifloat.h"
#include "unit/layers/model_files.h"

namespace narrowfloat {
namespace {

namespace fs = std::filesystem;

class DequantizeCheckpoint : public ::testing::Test {
 protected:
  TempDir dir_;
};

// One FP8 block of 2x32 with the given scale tensor.
std::vector<TestTensor> fp8_model(const TestTensor& scale) {
  std::vector<uint8_t> codes(64);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i);
  return {tensor_of("a.fc.weight", DType::kF8E4M3, {2, 32}, codes), scale};
}

constexpr const char* kFp8Config =
    R"({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})";

TEST_F(DequantizeCheckpoint, DecodesByHand) {
  const std::vector<uint8_t> packed = {0x21, 0x43, 0x65, 0x07, 0x98, 0xBA, 0xDC, 0xFE};
  const std::vector<float> codes = {0.5F,  1,     1.5F, 2,     3,  4,  6,  0,
                                    -0.0F, -0.5F, -1,   -1.5F, -2, -3, -4, -6};
  write_model_file(dir_ / "in.safetensors",
                   {tensor_of("a.weight_packed", DType::kU8, {1, 8}, packed),
                    tensor_of<uint8_t>("a.weight_scale", DType::kF8E4M3, {1, 1}, {0x3C}),  // 1.5
                    tensor_of<float>("a.weight_global_scale", DType::kF32, {1}, {7.0F})});
  dequantize_checkpoint(dir_ / "in.safetensors", dir_ / "out.safetensors", {.dtype = DType::kF32});
  const std::vector<float> values =
      stored_as<float>(Checkpoint(dir_ / "out.safetensors"), "a.weight");
  for (size_t i = 0; i < codes.size(); ++i) EXPECT_EQ(values.at(i), codes[i] * (1.5F / 7.0F)) << i;
}

// Columns 0 to 7 are in the first word, column 0 in its lowest bits; code 0 is -8.
TEST_F(DequantizeCheckpoint, DecodesIntegersByHand) {
  constexpr const char* kConfig = R"({"quantization_config": {"quant_method": "compressed-tensors",
      "format": "pack-quantized", "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
      "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": true}}}}})";
  const std::vector<uint32_t> words = {0x76543210, 0xFEDCBA98, 0, 0xFFFFFFFF,
                                       0x89ABCDEF, 0x01234567, 0, 0x88888888};
  const std::vector<TestTensor> scales = {
      tensor_of<float>("a.fc.weight_scale", DType::kF32, {1, 2}, {0.5F, -3}),
      tensor_of<uint16_t>("a.fc.weight_scale", DType::kF16, {1, 2},
                          {float_to_f16(0.5F), float_to_f16(-3)}),
      bf16_tensor("a.fc.weight_scale", {1, 2}, {0.5F, -3}),
  };
  for (size_t i = 0; i < scales.size(); ++i) {
    const std::string source = dir_ / std::to_string(i);
    write_model(source, {tensor_of("a.fc.weight_packed", DType::kI32, {1, 8}, words), scales[i],
                         tensor_of<int64_t>("a.fc.weight_shape", DType::kI64, {2}, {1, 64})});
    write_file(source + "/config.json", kConfig);
    dequantize_checkpoint(source, source + "-out", {.dtype = DType::kF32});
    const auto values = stored_as<float>(Checkpoint(source + "-out"), "a.fc.weight");
    ASSERT_EQ(values.size(), 64U);
    for (size_t col = 0; col < values.size(); ++col) {
      const int code = static_cast<int>(words[col / 8] >> (4 * (col % 8)) & 0xFU);
      const float scale = col < 32 ? 0.5F : -3;
      EXPECT_EQ(values[col], static_cast<float>(code - 8) * scale) << i << ", " << col;
    }
  }
}

TEST_F(DequantizeCheckpoint, WidensScalesOfOtherDtypes) {
  const std::vector<TestTensor> scales = {
      tensor_of<float>("a.fc.weight_scale_inv", DType::kF32, {1, 1}, {0.5F}),
      tensor_of<uint16_t>("a.fc.weight_scale_inv", DType::kBF16, {1, 1}, {float_to_bf16(0.5F)}),
      tensor_of<uint8_t>("a.fc.weight_scale_inv", DType::kF8E8M0, {1, 1}, {126}),
  };
  for (size_t i = 0; i < scales.size(); ++i) {
    const std::string source = dir_ / std::to_string(i);
    write_model(source, fp8_model(scales[i]));
    write_file(source + "/config.json", kFp8Config);
    dequantize_checkpoint(source, source + "-out", {.dtype = DType::kF32});
    const auto values = stored_as<float>(Checkpoint(source + "-out"), "a.fc.weight");
    EXPECT_EQ(values.at(9), E4M3::decode(9) * 0.5F) << i;
  }
}

TEST_F(DequantizeCheckpoint, ReturnsToPlainConfigs) {
  write_model(dir_ / "in", tiny_model());
  for (const ConventionInfo& info : written_conventions()) {
    const std::string quantized = dir_ / info.name;
    QuantizeCheckpointOptions options;
    options.to = info.id;
    quantize_checkpoint(dir_ / "in", quantized, options);
    dequantize_checkpoint(quantized, quantized + "-back", {});
    EXPECT_EQ(nlohmann::json::parse(read_file(quantized + "-back/config.json")),
              nlohmann::json::parse(kTinyConfig));
    EXPECT_EQ(names_in(quantized + "-back"), names_in(dir_ / "in"));
    const Checkpoint back(quantized + "-back");
    EXPECT_EQ(back.shards()[0].metadata().count("narrowfloat.convention"), 0U);
    EXPECT_EQ(back.tensors().size(), tiny_model().size());
    for (const LogicalTensor& tensor : recognise(back)) EXPECT_EQ(tensor.dtype, DType::kBF16);
  }
}

TEST_F(DequantizeCheckpoint, ForgetsNestedDeclarations) {
  write_model(dir_ / "in",
              fp8_model(tensor_of<float>("a.fc.weight_scale_inv", DType::kF32, {1, 1}, {0.5F})));
  write_file(dir_ / "in/config.json",
             std::string("{\"x\": 1e-06, \"text_config\": ") + kFp8Config + "}");
  dequantize_checkpoint(dir_ / "in", dir_ / "out", {});
  const std::string text = read_file(dir_ / "out/config.json");
  EXPECT_EQ(text.find("quantization_config"), std::string::npos) << text;
  EXPECT_NE(text.find("1e-06"), std::string::npos);
}

TEST_F(DequantizeCheckpoint, TheMemoryBudgetDoesNotShowInTheBytes) {
  write_model(dir_ / "in", {bf16_tensor("a.fc.weight", {700, 96})});
  for (const ConventionInfo& info : written_conventions()) {
    const std::string quantized = dir_ / info.name;
    QuantizeCheckpointOptions options;
    options.to = info.id;
    quantize_checkpoint(dir_ / "in", quantized, options);
    dequantize_checkpoint(quantized, quantized + "-all", {});
    dequantize_checkpoint(quantized, quantized + "-pieces", {.max_memory_bytes = 50'000});
    expect_same_files(quantized + "-all", quantized + "-pieces");
    // Parts of a tile.
    dequantize_checkpoint(quantized, quantized + "-rows", {.max_memory_bytes = 5'000});
    expect_same_files(quantized + "-all", quantized + "-rows");
  }
}

TEST_F(DequantizeCheckpoint, FindsCompanionsInOtherShards) {
  write_model(dir_ / "in", {bf16_tensor("a.fc.weight", {48, 64})});
  quantize_checkpoint(dir_ / "in", dir_ / "one", {});
  const Checkpoint one(dir_ / "one");
  fs::create_directory(dir_ / "two");
  for (const CheckpointTensor& tensor : one.tensors()) {
    const TestTensor copy{{tensor.info.name, tensor.info.dtype, tensor.info.shape},
                          stored_bytes(one, tensor.info.name)};
    write_model_file(dir_ / ("two/" + tensor.info.name + ".safetensors"), {copy});
  }
  for (const char* name : {"config.json", "tokenizer.json"}) {
    fs::copy_file((dir_ / "one/") + name, (dir_ / "two/") + name);
  }
  EXPECT_EQ(Checkpoint(dir_ / "two").shards().size(), 3U);
  dequantize_checkpoint(dir_ / "one", dir_ / "one-back", {});
  dequantize_checkpoint(dir_ / "two", dir_ / "two-back", {});
  const CheckpointDiff diff = diff_checkpoints(dir_ / "one-back", dir_ / "two-back");
  for (const TensorDiff& tensor : diff.tensors) EXPECT_EQ(tensor.status, "identical");
}

TEST_F(DequantizeCheckpoint, RefusesUnusableGlobalScales) {
  for (const float scale : {0.0F, -1.0F, std::numeric_limits<float>::infinity()}) {
    write_model_file(
        dir_ / "in.safetensors",
        {tensor_of<uint8_t>("a.weight_packed", DType::kU8, {1, 8}, std::vector<uint8_t>(8, 0)),
         tensor_of<uint8_t>("a.weight_scale", DType::kF8E4M3, {1, 1}, {0x38}),
         tensor_of<float>("a.weight_global_scale", DType::kF32, {1}, {scale})});
    expect_error(ErrorKind::kCorruptData, "the global scale must be finite and positive", [&] {
      dequantize_checkpoint(dir_ / "in.safetensors", dir_ / "out.safetensors", {});
    });
    EXPECT_FALSE(fs::exists(dir_ / "out.safetensors"));
  }
}

// MXFP8 of a row of 32 with the given codes and scale.
std::vector<TestTensor> mxfp8_model(uint8_t code, uint8_t scale) {
  std::vector<uint8_t> codes(64, 0x38);  // 1.0
  codes[32 + 5] = code;
  return {tensor_of("a.weight", DType::kF8E4M3, {2, 32}, codes),
          tensor_of<uint8_t>("a.weight_scale", DType::kU8, {2, 1}, {127, scale})};
}

TEST_F(DequantizeCheckpoint, RefusesValuesBeyondTheDtype) {
  write_model_file(dir_ / "in.safetensors", mxfp8_model(0x7E, 127 + 8));  // 448 * 256
  expect_error(
      ErrorKind::kInvalidArgument,
      "option dtype: tensor 'a.weight' has 1 value(s) beyond the range of F16, the first, 114688, "
      "at [1, 5]; use bf16 or fp32",
      [&] {
        dequantize_checkpoint(dir_ / "in.safetensors", dir_ / "out.safetensors",
                              {.dtype = DType::kF16});
      });
  EXPECT_EQ(names_in(dir_.path()), std::vector<std::string>{"in.safetensors"});
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    dequantize_checkpoint(dir_ / "in.safetensors", dir_ / "out.safetensors",
                          {.dtype = dtype, .force = true});
  }
}

// As --nonfinite keep writes them for an infinity: nothing can hold them.
TEST_F(DequantizeCheckpoint, WarnsOfValuesBeyondF32) {
  write_model_file(dir_ / "in.safetensors", mxfp8_model(0x7E, 254));
  const CheckpointReport report = dequantize_checkpoint(
      dir_ / "in.safetensors", dir_ / "out.safetensors", {.dtype = DType::kF32});
  ASSERT_EQ(report.warnings.size(), 1U);
  EXPECT_NE(report.warnings[0].find("1 value(s) are beyond the range of F32"), std::string::npos);
}

TEST_F(DequantizeCheckpoint, WarnsOfScalesThatNoQuantizerWrites) {
  write_model_file(dir_ / "mx.safetensors", mxfp8_model(0x38, 0xFF));
  const CheckpointReport mx =
      dequantize_checkpoint(dir_ / "mx.safetensors", dir_ / "mx-out.safetensors", {});
  ASSERT_EQ(mx.warnings.size(), 1U);
  EXPECT_NE(mx.warnings[0].find("'a.weight': 1 block scale(s) are NaN"), std::string::npos);
  write_model_file(
      dir_ / "nv.safetensors",
      {tensor_of<uint8_t>("a.weight_packed", DType::kU8, {4, 8}, std::vector<uint8_t>(32, 0x11)),
       tensor_of<uint8_t>("a.weight_scale", DType::kF8E4M3, {4, 1}, {0x7F, 0xFF, 0xB8, 0x80}),
       tensor_of<float>("a.weight_global_scale", DType::kF32, {1}, {1.0F})});
  const CheckpointReport nv =
      dequantize_checkpoint(dir_ / "nv.safetensors", dir_ / "nv-out.safetensors", {});
  ASSERT_EQ(nv.warnings.size(), 2U);
  EXPECT_NE(nv.warnings[0].find("2 block scale(s) are NaN"), std::string::npos);
  EXPECT_NE(nv.warnings[1].find("1 block scale(s) are negative"), std::string::npos);
}

TEST_F(DequantizeCheckpoint, RecordsSourceAndSettings) {
  write_model_file(dir_ / "in.safetensors", mxfp8_model(0x38, 127));
  dequantize_checkpoint(dir_ / "in.safetensors", dir_ / "out.safetensors", {});
  const SafetensorsReader file(dir_ / "out.safetensors");
  EXPECT_EQ(file.metadata().at("narrowfloat.settings"), "dtype=BF16");
  EXPECT_TRUE(file.metadata().at("narrowfloat.source").starts_with("xxh64:"));
}

TEST_F(DequantizeCheckpoint, RefusesPlainSourcesAndOtherDtypes) {
  write_model(dir_ / "in", tiny_model());
  expect_error(ErrorKind::kInvalidArgument, "no tensor is quantized",
               [&] { dequantize_checkpoint(dir_ / "in", dir_ / "out", {}); });
  expect_error(ErrorKind::kInvalidArgument, "option dtype: expected BF16, F16 or F32, got F64",
               [&] { dequantize_checkpoint(dir_ / "in", dir_ / "out", {.dtype = DType::kF64}); });
}

}  // namespace
}  // namespace narrowfloat
