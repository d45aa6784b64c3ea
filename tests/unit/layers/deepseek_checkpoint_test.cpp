// DeepSeek-V4: two conventions in one model. And other producers' FP8 in blocks of 128x128.
#include <nlohmann/json.hpp>

#include "formats/minifloat.h"
#include "formats/ue8m0.h"
#include "unit/layers/model_files.h"

namespace narrowfloat {
namespace {

constexpr int64_t kWeightRows = 130;  // Two blocks of rows, and 1.25 blocks of columns.
constexpr int64_t kWeightCols = 160;
const std::string kExpert = "layers.0.ffn.experts.3.w1.";
const std::string kDense = "layers.0.attn.wq_a.";
constexpr const char* kQuantization =
    R"("quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0",
       "activation_scheme": "dynamic", "weight_block_size": [128, 128]})";

std::string v4_config(const std::string& members) {
  return R"({"model_type": "deepseek_v4", )" + members + kQuantization + "}";
}
const std::string kV4Config = v4_config(R"("expert_dtype": "fp4", )");

std::vector<uint8_t> counted_bytes(int64_t count, int first, int period) {
  std::vector<uint8_t> bytes(static_cast<size_t>(count));
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<uint8_t>(first + static_cast<int>(i) % period);
  }
  return bytes;
}

// Codes with 0x7F left out: no NaN.
const std::vector<uint8_t> kFp8Codes = counted_bytes(kWeightRows * kWeightCols, 0, 0x7F);
const std::vector<uint8_t> kFp4Codes = counted_bytes(kWeightRows * kWeightCols / 2, 0, 251);
const std::vector<uint8_t> kFp4Scales = counted_bytes(kWeightRows * kWeightCols / 32, 120, 7);
const std::vector<uint8_t> kBlockScales = {119, 122, 125, 127};

std::vector<TestTensor> v4_model() {
  return {tensor_of(kExpert + "weight", DType::kI8, {kWeightRows, kWeightCols / 2}, kFp4Codes),
          tensor_of(kExpert + "scale", DType::kF8E8M0, {kWeightRows, kWeightCols / 32}, kFp4Scales),
          tensor_of(kDense + "weight", DType::kF8E4M3, {kWeightRows, kWeightCols}, kFp8Codes),
          tensor_of(kDense + "scale", DType::kF8E8M0, {2, 2}, kBlockScales),
          f32_tensor("layers.0.hc_attn.scale", {4}),
          bf16_tensor("layers.0.norm.weight", {8})};
}

float expert_value(int64_t row, int64_t col) {
  const int64_t index = row * kWeightCols + col;
  const int byte = kFp4Codes[static_cast<size_t>(index / 2)];
  const auto code = static_cast<uint8_t>(index % 2 == 0 ? byte & 0xF : byte >> 4);
  return E2M1::decode(code) * UE8M0::decode(kFp4Scales[static_cast<size_t>(index / 32)]);
}

float dense_value(int64_t row, int64_t col, const std::vector<float>& scales) {
  return E4M3::decode(kFp8Codes[static_cast<size_t>(row * kWeightCols + col)]) *
         scales[static_cast<size_t>(row / 128 * 2 + col / 128)];
}

class DeepSeekCheckpoint : public ::testing::Test {
 protected:
  void write(const std::vector<TestTensor>& tensors, const std::string& config) {
    std::filesystem::create_directories(source_);
    write_model_file(source_ + "/model.safetensors", tensors);
    write_file(source_ + "/config.json", config);
  }
  [[nodiscard]] std::map<std::string, LogicalTensor> recognised() const {
    std::map<std::string, LogicalTensor> tensors;
    for (const LogicalTensor& tensor : recognise(Checkpoint(source_))) {
      tensors[tensor.name] = tensor;
    }
    return tensors;
  }
  void expect_corrupt(std::string_view part) const {
    expect_error(ErrorKind::kCorruptData, part, [&] { (void)recognised(); });
  }

  TempDir dir_;
  const std::string source_ = dir_ / "model";
};

TEST_F(DeepSeekCheckpoint, ExpertsAndDenseLayersHaveTheirConventions) {
  // The member of V4, that of V4.1, and none at all.
  std::string inside = v4_config("");
  inside.replace(inside.find("\"fmt\""), 0, "\"expert_dtype\": \"fp4\", ");
  for (const std::string& config : {kV4Config, inside, std::string("{}")}) {
    write(v4_model(), config);
    const std::map<std::string, LogicalTensor> tensors = recognised();
    EXPECT_EQ(tensors.size(), 4U);
    const LogicalTensor& expert = tensors.at(kExpert + "weight");
    EXPECT_EQ(expert.convention, Convention::kMxfp4DeepSeek) << config;
    EXPECT_EQ(expert.shape, (std::vector<int64_t>{kWeightRows, kWeightCols}));
    EXPECT_DOUBLE_EQ(expert.bits_per_element(), 4.25);
    EXPECT_EQ(tensors.at(kDense + "weight").convention, Convention::kFp8Block) << config;
    // A parameter that is called scale is none of a weight.
    EXPECT_FALSE(tensors.at("layers.0.hc_attn.scale").convention.has_value());
  }
}

TEST_F(DeepSeekCheckpoint, DequantizesBoth) {
  write(v4_model(), kV4Config);
  dequantize_checkpoint(source_, dir_ / "plain", {.dtype = DType::kF32});
  const Checkpoint plain(dir_ / "plain");
  const auto expert = stored_as<float>(plain, kExpert + "weight");
  const auto dense = stored_as<float>(plain, kDense + "weight");
  std::vector<float> scales;
  scales.reserve(kBlockScales.size());
  for (const uint8_t scale : kBlockScales) scales.push_back(UE8M0::decode(scale));
  for (int64_t row = 0; row < kWeightRows; ++row) {
    for (int64_t col = 0; col < kWeightCols; ++col) {
      const auto at = static_cast<size_t>(row * kWeightCols + col);
      ASSERT_EQ(expert[at], expert_value(row, col)) << row << " " << col;
      ASSERT_EQ(dense[at], dense_value(row, col, scales)) << row << " " << col;
    }
  }
  // Nothing says any more that there are codes.
  EXPECT_EQ(nlohmann::json::parse(read_file(dir_ / "plain/config.json")),
            nlohmann::json::parse(R"({"model_type": "deepseek_v4"})"));
  EXPECT_TRUE(diff_checkpoints(source_, dir_ / "plain").equal);
  EXPECT_EQ(recognise(plain).size(), 4U);
}

TEST_F(DeepSeekCheckpoint, ADeclarationMustFitTheExperts) {
  write(v4_model(), v4_config(""));
  expect_corrupt(
      "declares fp8-block (fp8, fmt e4m3, weight_block_size [128,128]), but with its "
      "companions it is mxfp4-deepseek");
  std::vector<TestTensor> tensors = v4_model();
  tensors.erase(tensors.begin(), tensors.begin() + 2);
  write(tensors, kV4Config);
  expect_corrupt(
      "declares mxfp4-deepseek (fp8, fmt e4m3, weight_block_size [128,128], "
      "expert_dtype fp4), but no tensor is stored so");
  tensors = v4_model();
  tensors.erase(tensors.begin() + 2, tensors.begin() + 4);
  write(tensors, kV4Config);
  expect_corrupt("declares fp8-block (fp8");
}

TEST_F(DeepSeekCheckpoint, BrokenExpertsAreNamed) {
  std::vector<TestTensor> tensors = v4_model();
  tensors.erase(tensors.begin() + 1);
  write(tensors, kV4Config);
  expect_corrupt("misses its companion 'layers.0.ffn.experts.3.w1.scale' (F8_E8M0 [130, 5])");
  tensors = v4_model();
  tensors[1] = f32_tensor(kExpert + "scale", {kWeightRows, kWeightCols / 32});
  write(tensors, kV4Config);
  expect_corrupt("needs a companion F8_E8M0 [130, 5], got 'layers.0.ffn.experts.3.w1.scale' F32");
  tensors = v4_model();
  tensors.push_back(tensor_of("b.weight", DType::kF8E4M3, {kWeightRows, kWeightCols}, kFp8Codes));
  tensors.push_back(tensor_of("b.scale", DType::kF8E8M0, {2, 2}, kBlockScales));
  tensors[2].spec.dtype =
      DType::kU8;  // A tensor of the dense layer: bytes, but not the declared ones.
  write(tensors, kV4Config);
  expect_corrupt("belongs to 'layers.0.attn.wq_a.weight', which must be F8_E4M3");
}

TEST_F(DeepSeekCheckpoint, PlainIntegersStayPlain) {
  write({tensor_of("a.weight", DType::kI8, {kWeightRows, kWeightCols / 2}, kFp4Codes),
         f32_tensor("a.scale", {kWeightRows})},
        "{}");
  for (const auto& [name, tensor] : recognised()) EXPECT_FALSE(tensor.convention) << name;
}

TEST_F(DeepSeekCheckpoint, QuantizeRefusesIt) {
  write(v4_model(), kV4Config);
  expect_error(ErrorKind::kInvalidArgument, "is quantized already (fp8-block)",
               [&] { quantize_checkpoint(source_, dir_ / "out", {}); });
}

// compressed-tensors' preset FP8_BLOCK.
constexpr const char* kFp8BlockPreset =
    R"({"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8,
        "type": "float", "strategy": "block", "block_structure": [128, 128]}}}}})";

TEST_F(DeepSeekCheckpoint, CompressedTensorsBlocksAreFp8Block) {
  const std::vector<float> scales = {0.25F, 0.5F, 3.0F, 0.125F};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const TestTensor scale = dtype == DType::kF32
                                 ? tensor_of(kDense + "weight_scale", dtype, {2, 2}, scales)
                                 : bf16_tensor(kDense + "weight_scale", {2, 2}, scales);
    const TestTensor codes =
        tensor_of(kDense + "weight", DType::kF8E4M3, {kWeightRows, kWeightCols}, kFp8Codes);
    for (const char* config : {kFp8BlockPreset, "{}"}) {
      write({codes, scale}, config);
      EXPECT_EQ(recognised().at(kDense + "weight").convention, Convention::kFp8Block);
      dequantize_checkpoint(source_, dir_ / "plain", {.dtype = DType::kF32, .force = true});
      const auto values = stored_as<float>(Checkpoint(dir_ / "plain"), kDense + "weight");
      for (const auto& [row, col] : {std::pair(0, 3), {5, 129}, {128, 9}, {129, 159}}) {
        EXPECT_EQ(values[static_cast<size_t>(row * kWeightCols + col)],
                  dense_value(row, col, scales));
      }
    }
    write({codes}, kFp8BlockPreset);
    expect_corrupt("misses its companion");
  }
}

TEST_F(DeepSeekCheckpoint, OtherStrategiesOfFp8AreNotRead) {
  write({f32_tensor("a.weight", {4, 4})}, "{}");
  for (const auto& [from, to] :
       {std::pair("\"block\"", "\"group\""),
        {"[128, 128]", "[64, 128]"},
        {"\"num_bits\": 8", "\"num_bits\": 4"},
        {"\"config_groups\": {", "\"config_groups\": {\"group_1\": {}, "}}) {
    std::string config = kFp8BlockPreset;
    config.replace(config.find(from), std::string_view(from).size(), to);
    write_file(source_ + "/config.json", config);
    expect_error(ErrorKind::kUnsupported, "format float-quantized' cannot be read",
                 [&] { (void)recognised(); });
  }
}

}  // namespace
}  // namespace narrowfloat
