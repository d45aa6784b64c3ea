// Checks and repairs through the C++ API; tests/cli/test_check.py plants every fault.
#include <array>
#include <numeric>
#include <set>

#include "narrowfloat/check.h"
#include "unit/layers/model_files.h"

namespace narrowfloat {
namespace {

class CheckCheckpoint : public ::testing::Test {
 protected:
  void SetUp() override { write_model(plain_, tiny_model(64, 128)); }

  std::string quantized(Convention convention, QuantizeCheckpointOptions options = {}) {
    const std::string target = dir_ / std::string(convention_info(convention).name);
    options.to = convention;
    quantize_checkpoint(plain_, target, options);
    return target;
  }

  // Multiplies the stored global scale of the first expert's gate.
  void scale_gate(const std::string& directory, float factor) {
    const Checkpoint checkpoint(directory);
    std::vector<TestTensor> tensors;
    for (const CheckpointTensor& tensor : checkpoint.tensors()) {
      const TensorInfo& info = tensor.info;
      tensors.push_back({{info.name, info.dtype, info.shape}, stored_bytes(checkpoint, info.name)});
      if (info.name != "model.layers.0.mlp.experts.0.gate_proj.weight_global_scale") continue;
      float scale = 0;
      std::memcpy(&scale, tensors.back().data.data(), sizeof(scale));
      scale *= factor;
      std::memcpy(tensors.back().data.data(), &scale, sizeof(scale));
    }
    const std::map<std::string, std::string> metadata = checkpoint.shards().front().metadata();
    write_model_file(directory + "/model.safetensors", tensors, metadata);
  }

  TempDir dir_;
  std::string plain_ = dir_ / "plain";
};

TEST_F(CheckCheckpoint, WhatQuantizeWritesIsReproducedAndMeasured) {
  for (const ConventionInfo& info : written_conventions()) {
    const std::string target = quantized(info.id);
    const CheckpointCheck check = check_checkpoint(target, {.against = plain_});
    for (const CheckedTensor& tensor : check.tensors) {
      EXPECT_EQ(tensor.requantization.has_value(), tensor.tensor.convention.has_value());
      if (!tensor.requantization) continue;
      EXPECT_TRUE(tensor.requantization->is_identical()) << tensor.tensor.name;
      const std::vector<int64_t>& counts = tensor.statistics->code_counts;
      EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), int64_t{0}),
                tensor.tensor.num_elements());
    }
    for (const Finding& finding : check.findings) {
      EXPECT_NE(finding.severity, Severity::kError) << info.name << ": " << finding.message;
    }
    EXPECT_GT(check.total.sqnr_db, 17);
    EXPECT_FALSE(check.fingerprint.empty());
  }
}

TEST_F(CheckCheckpoint, FindingsAreSortedByThisOrder) {
  const std::string target = quantized(Convention::kNvfp4CompressedTensors);
  scale_gate(target, -1);
  const CheckpointCheck check = check_checkpoint(target);
  ASSERT_FALSE(check.findings.empty());
  EXPECT_EQ(check.findings.front().id, "NF-C008");
  EXPECT_FALSE(check.passed());
  for (size_t i = 1; i < check.findings.size(); ++i) {
    EXPECT_LE(check.findings[i - 1].severity, check.findings[i].severity);
  }
}

TEST_F(CheckCheckpoint, CancelledAndImpossibleChecks) {
  const std::string target = quantized(Convention::kMxfp8CompressedTensors);
  CheckCheckpointOptions options;
  options.cancelled = [] { return true; };
  EXPECT_TRUE(check_checkpoint(target, options).cancelled);
  options = {.against = plain_, .scales_only = true};
  EXPECT_THROW(check_checkpoint(target, options), Error);
  EXPECT_THROW(check_checkpoint(target + "/none"), Error);
}

// A factor of two is exact; the larger decode scale is the smaller divisor.
TEST_F(CheckCheckpoint, FixKeepsValuesWhereTheRatioIsAPowerOfTwo) {
  const std::string target = quantized(Convention::kNvfp4CompressedTensors);
  EXPECT_THROW(fix_checkpoint(target, dir_ / "nothing"), Error);
  scale_gate(target, 2);
  const CheckpointReport report = fix_checkpoint(target, dir_ / "fixed");
  EXPECT_EQ(report.total.max_abs, 0);
  std::set<std::string> rescaled;
  for (const TensorReport& tensor : report.tensors) {
    if (tensor.action == "rescale") rescaled.insert(tensor.name);
  }
  EXPECT_EQ(rescaled, std::set<std::string>{"model.layers.0.mlp.experts.0.gate_proj.weight"});
  EXPECT_TRUE(diff_checkpoints(target, dir_ / "fixed").equal);
  for (const Finding& finding : check_checkpoint(dir_ / "fixed").findings) {
    EXPECT_NE(finding.id, "NF-C007") << finding.message;
  }
}

TEST_F(CheckCheckpoint, ASearchOverAllScalesLowersEveryTensorsError) {
  const std::array<Convention, 2> conventions = {Convention::kNvfp4ModelOpt,
                                                 Convention::kMxfp4CompressedTensors};
  for (const Convention convention : conventions) {
    const CheckpointCheck amax = check_checkpoint(quantized(convention), {.against = plain_});
    const std::string target =
        quantized(convention, {.scale_search = ScaleSearch::kFull, .force = true});
    const CheckpointCheck full = check_checkpoint(target, {.against = plain_});
    EXPECT_GT(full.total.sqnr_db, amax.total.sqnr_db + 0.2);
    for (size_t i = 0; i < full.tensors.size(); ++i) {
      if (!full.tensors[i].figures) continue;
      EXPECT_LT(full.tensors[i].figures->mse, amax.tensors[i].figures->mse);
      EXPECT_TRUE(full.tensors[i].requantization->is_identical());
    }
  }
}

}  // namespace
}  // namespace narrowfloat
