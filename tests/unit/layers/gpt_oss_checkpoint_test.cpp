// Checkpoints of gpt-oss through the commands on whole checkpoints: dequantize, diff, quantize.
#include <nlohmann/json.hpp>

#include "support/gpt_oss_files.h"
#include "unit/layers/model_files.h"

namespace narrowfloat {
namespace {

using testing::FileTensor;
using testing::GptOssModel;
using testing::GptOssNames;

constexpr testing::GptOssShape kSquare{.hidden = 96, .inter = 96, .experts = 5, .top_k = 2};

class GptOssCheckpoint : public ::testing::Test {
 protected:
  TempDir dir_;
  const std::string source_ = dir_ / "model";
};

TEST_F(GptOssCheckpoint, DequantizesToThePlainModelOfItsNaming) {
  for (const testing::GptOssShape& shape : {testing::GptOssShape{}, kSquare}) {
    const GptOssModel model(shape);
    for (const GptOssNames names : {GptOssNames::kHuggingFace, GptOssNames::kOriginal}) {
      model.write(source_, names);
      const CheckpointReport report = dequantize_checkpoint(source_, dir_ / "plain", {});
      const Checkpoint plain(dir_ / "plain");
      const std::vector<FileTensor> wanted = model.plain_tensors(names);
      EXPECT_EQ(plain.tensors().size(), wanted.size());
      for (const FileTensor& tensor : wanted) {
        const CheckpointTensor* found = plain.find(tensor.spec.name);
        ASSERT_NE(found, nullptr) << tensor.spec.name;
        EXPECT_EQ(found->info.dtype, DType::kBF16) << tensor.spec.name;
        EXPECT_EQ(found->info.shape, tensor.spec.shape) << tensor.spec.name;
        const std::vector<std::byte> bytes = stored_bytes(plain, tensor.spec.name);
        ASSERT_EQ(bytes.size(), tensor.data.size());
        EXPECT_EQ(std::memcmp(bytes.data(), tensor.data.data(), bytes.size()), 0)
            << tensor.spec.name;
      }
      EXPECT_EQ(nlohmann::json::parse(read_file(dir_ / "plain/config.json")),
                nlohmann::json::parse(model.config_text(names, false)));
      EXPECT_TRUE(report.warnings.empty());
      std::filesystem::remove_all(dir_ / "plain");
    }
  }
}

TEST_F(GptOssCheckpoint, TheMemoryBudgetDoesNotShowInTheBytes) {
  const GptOssModel model;
  for (const GptOssNames names : {GptOssNames::kHuggingFace, GptOssNames::kOriginal}) {
    model.write(source_, names);
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      const CheckpointReport all =
          dequantize_checkpoint(source_, dir_ / "all", {.dtype = dtype, .force = true});
      // Three of the six experts of a matrix, and then one.
      for (const uint64_t budget : {all.peak_buffer_bytes / 2, all.peak_buffer_bytes / 4}) {
        const CheckpointReport some = dequantize_checkpoint(
            source_, dir_ / "some", {.dtype = dtype, .max_memory_bytes = budget, .force = true});
        EXPECT_LE(some.peak_buffer_bytes, budget);
        EXPECT_LT(some.peak_buffer_bytes, all.peak_buffer_bytes);
        expect_same_files(dir_ / "all", dir_ / "some");
      }
    }
  }
  // If the unquantized weight is the transposed one, the smallest range is an expert.
  model.write(source_);
  expect_error(ErrorKind::kInvalidArgument, "option max_memory_bytes",
               [&] { dequantize_checkpoint(source_, dir_ / "few", {.max_memory_bytes = 50'000}); });
}

TEST_F(GptOssCheckpoint, DiffSeesTheSameValues) {
  const GptOssModel model(kSquare);
  for (const GptOssNames names : {GptOssNames::kHuggingFace, GptOssNames::kOriginal}) {
    model.write(source_, names);
    dequantize_checkpoint(source_, dir_ / "plain", {.force = true});
    for (const auto& [a, b] : {std::pair(source_, dir_ / "plain"),
                               std::pair(dir_ / "plain", source_), std::pair(source_, source_)}) {
      const CheckpointDiff diff = diff_checkpoints(a, b);
      EXPECT_TRUE(diff.equal);
      for (const TensorDiff& tensor : diff.tensors) {
        const bool is_expert =
            a != b && (tensor.name.ends_with("_proj") || tensor.name.ends_with("_weight"));
        EXPECT_EQ(tensor.status, is_expert ? "same values" : "identical") << tensor.name;
      }
    }
  }
}

TEST_F(GptOssCheckpoint, DiffFindsOneCode) {
  const GptOssModel model(kSquare);
  for (const GptOssNames names : {GptOssNames::kHuggingFace, GptOssNames::kOriginal}) {
    model.write(source_, names);
    dequantize_checkpoint(source_, dir_ / "plain", {.force = true});
    std::vector<FileTensor> tensors = model.tensors(names);
    FileTensor& down = tensors[2];
    ASSERT_TRUE(down.spec.name.ends_with("blocks"));
    // Expert 3, row 7, column 10: 0 becomes 6 times its scale, or what it was is negated.
    uint8_t& byte = down.data[static_cast<size_t>((3 * 96 + 7) * 48 + 5)];
    byte = static_cast<uint8_t>((byte & 7) == 0 ? byte ^ 7 : byte ^ 8);
    testing::write_tensors(source_ + "/model.safetensors", tensors);
    const CheckpointDiff diff = diff_checkpoints(source_, dir_ / "plain");
    EXPECT_FALSE(diff.equal);
    for (const TensorDiff& tensor : diff.tensors) {
      if (tensor.status != "different") continue;
      EXPECT_EQ(tensor.name + (names == GptOssNames::kOriginal ? ".blocks" : "_blocks"),
                down.spec.name);
      // Its position in the unquantized weight.
      const int64_t at = names == GptOssNames::kOriginal ? 7 * 96 + 10 : 10 * 96 + 7;
      EXPECT_EQ(tensor.figures.max_abs_index, 3 * 96 * 96 + at);
    }
  }
}

TEST_F(GptOssCheckpoint, ScalesMayLieInAnotherShard) {
  const GptOssModel model;
  model.write(source_);
  const std::string split = dir_ / "split";
  std::filesystem::create_directory(split);
  std::vector<FileTensor> first;
  std::vector<FileTensor> second;
  for (FileTensor& tensor : model.tensors(GptOssNames::kHuggingFace)) {
    (tensor.spec.name.ends_with("_scales") ? second : first).push_back(std::move(tensor));
  }
  testing::write_tensors(split + "/model-00001-of-00002.safetensors", first);
  testing::write_tensors(split + "/model-00002-of-00002.safetensors", second);
  write_file(split + "/config.json", read_file(source_ + "/config.json"));
  const CheckpointDiff diff = diff_checkpoints(source_, split);
  for (const TensorDiff& tensor : diff.tensors) EXPECT_EQ(tensor.status, "identical");
  EXPECT_EQ(diff.tensors.size(), 2U * 6);
}

TEST_F(GptOssCheckpoint, WarnsOfScalesThatNoQuantizerWrites) {
  const GptOssModel model;
  std::vector<FileTensor> tensors = model.tensors(GptOssNames::kHuggingFace);
  model.write(source_);
  ASSERT_TRUE(tensors[1].spec.name.ends_with("gate_up_proj_scales"));
  tensors[1].data[4] = 0xFF;
  testing::write_tensors(source_ + "/model.safetensors", tensors);
  const CheckpointReport report = dequantize_checkpoint(source_, dir_ / "plain", {});
  ASSERT_EQ(report.warnings.size(), 1U);
  EXPECT_NE(report.warnings[0].find("1 block scale(s) are NaN"), std::string::npos);
}

// 6 * 2^126 is beyond bf16; the place is that of the code.
TEST_F(GptOssCheckpoint, SaysWhereAValueIsBeyondTheDtype) {
  const GptOssModel model;
  std::vector<FileTensor> tensors = model.tensors(GptOssNames::kHuggingFace);
  model.write(source_);
  tensors[0].data[3 * 16] = 0x02;  // Row 1, column 0: 1.0.
  tensors[1].data[3] = 127 + 17;
  testing::write_tensors(source_ + "/model.safetensors", tensors);
  expect_error(ErrorKind::kInvalidArgument, "beyond the range of F16",
               [&] { dequantize_checkpoint(source_, dir_ / "plain", {.dtype = DType::kF16}); });
  EXPECT_FALSE(std::filesystem::exists(dir_ / "plain"));
}

TEST_F(GptOssCheckpoint, QuantizeRefusesIt) {
  const GptOssModel model;
  model.write(source_);
  for (const Convention to :
       {Convention::kNvfp4CompressedTensors, Convention::kMxfp4CompressedTensors}) {
    QuantizeCheckpointOptions options;
    options.to = to;
    expect_error(ErrorKind::kInvalidArgument, "is quantized already (mxfp4-gpt-oss); dequantize",
                 [&] { quantize_checkpoint(source_, dir_ / "out", options); });
  }
  QuantizeCheckpointOptions options;
  options.to = Convention::kMxfp4GptOss;
  expect_error(ErrorKind::kInvalidArgument,
               "option to: 'mxfp4-gpt-oss' is a convention that is written by conversions only; "
               "expected one of nvfp4-ct, nvfp4-modelopt, mxfp4-ct, mxfp8-ct, fp8-block",
               [&] { quantize_checkpoint(source_, dir_ / "out", options); });
  EXPECT_FALSE(std::filesystem::exists(dir_ / "out"));
}

}  // namespace
}  // namespace narrowfloat
