// The verdicts of diff.
#include "unit/layers/model_files.h"

namespace narrowfloat {
namespace {

class DiffCheckpoints : public ::testing::Test {
 protected:
  CheckpointDiff diff(const std::vector<TestTensor>& a, const std::vector<TestTensor>& b) {
    write_model_file(dir_ / "a.safetensors", a);
    write_model_file(dir_ / "b.safetensors", b);
    return diff_checkpoints(dir_ / "a.safetensors", dir_ / "b.safetensors");
  }

  TempDir dir_;
};

const std::vector<float> kValues = {1, -2, 0, 4};

TEST_F(DiffCheckpoints, EqualBytesAreIdentical) {
  const CheckpointDiff result = diff(tiny_model(), tiny_model());
  EXPECT_TRUE(result.equal);
  for (const TensorDiff& tensor : result.tensors) EXPECT_EQ(tensor.status, "identical");
}

TEST_F(DiffCheckpoints, OtherDtypesCanHoldTheSameValues) {
  const CheckpointDiff result =
      diff({tensor_of("w", DType::kF32, {2, 2}, kValues)}, {bf16_tensor("w", {2, 2}, kValues)});
  EXPECT_TRUE(result.equal);
  EXPECT_EQ(result.tensors.at(0).status, "same values");
  EXPECT_EQ(result.tensors.at(0).detail, "F32 and BF16");
}

TEST_F(DiffCheckpoints, SignsOfZeroAreNotedOnly) {
  std::vector<float> other = kValues;
  other[2] = -0.0F;
  const CheckpointDiff result =
      diff({bf16_tensor("w", {4}, kValues)}, {bf16_tensor("w", {4}, other)});
  EXPECT_TRUE(result.equal);
  EXPECT_EQ(result.tensors.at(0).status, "same values");
  EXPECT_EQ(result.tensors.at(0).detail, "BF16; zeros of different sign");
}

TEST_F(DiffCheckpoints, NanEqualsNan) {
  const TestTensor a = tensor_of<uint16_t>("w", DType::kBF16, {2}, {0x7FC0, 0x3F80});
  const TestTensor b = tensor_of<uint16_t>("w", DType::kBF16, {2}, {0x7FC1, 0x3F80});
  const CheckpointDiff result = diff({a}, {b});
  EXPECT_EQ(result.tensors.at(0).status, "same values");
  EXPECT_EQ(result.tensors.at(0).figures.nonfinite, 1);
}

TEST_F(DiffCheckpoints, DifferentValuesHaveFigures) {
  std::vector<float> other = kValues;
  other[1] = -2.5F;
  const CheckpointDiff result =
      diff({bf16_tensor("w", {2, 2}, kValues)}, {bf16_tensor("w", {2, 2}, other)});
  EXPECT_FALSE(result.equal);
  EXPECT_EQ(result.tensors.at(0).status, "different");
  EXPECT_EQ(result.tensors.at(0).figures.max_abs, 0.5);
  EXPECT_EQ(result.tensors.at(0).figures.max_abs_index, 1);
  EXPECT_DOUBLE_EQ(result.total.mse, 0.25 / 4);
}

TEST_F(DiffCheckpoints, IntegersAreComparedByBytes) {
  const CheckpointDiff result = diff({tensor_of<int32_t>("i", DType::kI32, {2}, {1, 2}),
                                      tensor_of<int32_t>("j", DType::kI32, {2}, {1, 2})},
                                     {tensor_of<int32_t>("i", DType::kI32, {2}, {1, 3}),
                                      tensor_of<int64_t>("j", DType::kI64, {2}, {1, 2})});
  EXPECT_FALSE(result.equal);
  EXPECT_EQ(result.tensors.at(0).detail, "bytes of I32 differ");
  EXPECT_EQ(result.tensors.at(1).detail, "I32 and I64");
}

TEST_F(DiffCheckpoints, MissingAndReshapedTensorsAreNamed) {
  const CheckpointDiff result =
      diff({bf16_tensor("a", {4}, kValues), bf16_tensor("c", {4}, kValues)},
           {bf16_tensor("b", {4}, kValues), bf16_tensor("c", {2, 2}, kValues)});
  EXPECT_FALSE(result.equal);
  EXPECT_EQ(result.tensors.at(0).status, "only in A");
  EXPECT_EQ(result.tensors.at(1).status, "only in B");
  EXPECT_EQ(result.tensors.at(2).status, "shape differs");
  EXPECT_EQ(result.tensors.at(2).detail, "[4] and [2, 2]");
}

TEST_F(DiffCheckpoints, QuantizedWeightsAreDequantized) {
  write_model(dir_ / "model", tiny_model());
  const CheckpointReport report = quantize_checkpoint(dir_ / "model", dir_ / "q", {});
  const CheckpointDiff result = diff_checkpoints(dir_ / "model", dir_ / "q");
  EXPECT_FALSE(result.equal);
  ASSERT_EQ(result.tensors.size(), report.tensors.size());
  for (size_t i = 0; i < result.tensors.size(); ++i) {
    const TensorDiff& tensor = result.tensors[i];
    if (report.tensors[i].action == "copy") {
      EXPECT_EQ(tensor.status, "identical");
      continue;
    }
    EXPECT_EQ(tensor.status, "different");
    EXPECT_EQ(tensor.detail, "BF16 and nvfp4-ct");
    EXPECT_EQ(tensor.figures.mse, report.tensors[i].figures->mse);
    EXPECT_EQ(tensor.figures.clipped_percent, report.tensors[i].figures->clipped_percent);
  }
}

TEST_F(DiffCheckpoints, ReciprocalGlobalScalesAreNamed) {
  write_model(dir_ / "model", tiny_model());
  QuantizeCheckpointOptions options;
  quantize_checkpoint(dir_ / "model", dir_ / "ct", options);
  options.to = Convention::kNvfp4ModelOpt;
  quantize_checkpoint(dir_ / "model", dir_ / "modelopt", options);
  int num_named = 0;
  for (const TensorDiff& tensor : diff_checkpoints(dir_ / "ct", dir_ / "modelopt").tensors) {
    if (tensor.status == "identical") continue;
    EXPECT_EQ(tensor.detail, "nvfp4-ct and nvfp4-modelopt; same codes, reciprocal global scale");
    EXPECT_LT(tensor.figures.relative_error, 1e-6);
    ++num_named;
  }
  EXPECT_EQ(num_named, 9);
}

TEST_F(DiffCheckpoints, OtherCodesAreNotCalledReciprocal) {
  write_model(dir_ / "model", tiny_model());
  QuantizeCheckpointOptions options;
  quantize_checkpoint(dir_ / "model", dir_ / "ct", options);
  options.to = Convention::kNvfp4ModelOpt;
  options.scale_search = ScaleSearch::kFourOverSix;
  quantize_checkpoint(dir_ / "model", dir_ / "modelopt", options);
  for (const TensorDiff& tensor : diff_checkpoints(dir_ / "ct", dir_ / "modelopt").tensors) {
    EXPECT_EQ(tensor.detail.find("reciprocal"), std::string::npos) << tensor.name;
  }
}

TEST_F(DiffCheckpoints, ClippingIsUnknownForAPlainSide) {
  const CheckpointDiff result =
      diff({bf16_tensor("w", {2, 2}, kValues)}, {bf16_tensor("w", {2, 2}, {1, 2, 3, 4})});
  EXPECT_FALSE(result.tensors.at(0).figures.clipped_percent.has_value());
  EXPECT_FALSE(result.total.clipped_percent.has_value());
}

TEST_F(DiffCheckpoints, PassesTheReadersWarningsOn) {
  write_model(dir_ / "a", tiny_model());
  write_model(dir_ / "b", tiny_model());
  write_file(dir_ / "b/pytorch_model.bin", "pickle");
  const CheckpointDiff result = diff_checkpoints(dir_ / "a", dir_ / "b");
  ASSERT_EQ(result.warnings.size(), 1U);
  EXPECT_NE(result.warnings[0].find("pytorch_model.bin"), std::string::npos);
}

TEST_F(DiffCheckpoints, ADequantizedCopyHasTheSameValues) {
  write_model(dir_ / "model", tiny_model());
  for (const ConventionInfo& info : written_conventions()) {
    const std::string quantized = dir_ / info.name;
    QuantizeCheckpointOptions options;
    options.to = info.id;
    quantize_checkpoint(dir_ / "model", quantized, options);
    dequantize_checkpoint(quantized, quantized + "-back", {.dtype = DType::kF32});
    const CheckpointDiff result = diff_checkpoints(quantized, quantized + "-back");
    EXPECT_TRUE(result.equal) << info.name;
  }
}

}  // namespace
}  // namespace narrowfloat
