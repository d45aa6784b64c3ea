// Encoding and decoding the way files need it: no zero scales, both directions of the global scale.
#include "layers/quantized_weight.h"
#include "unit/layers/model_files.h"

namespace narrowfloat {
namespace {

constexpr int64_t kQuantizedCols = 32;

QuantizedWeight encoded(const ConventionSpec& spec, const std::vector<float>& values,
                        const EncodeSettings& settings = {}) {
  float amax = 0;
  for (const float value : values) amax = std::max(amax, std::abs(value));
  const TensorScale scale = tensor_scale(spec, settings, amax);
  const auto rows = static_cast<int64_t>(values.size()) / kQuantizedCols;
  QuantizedWeight coded(spec, rows, kQuantizedCols, scale.stored);
  encode(TensorView::contiguous(values.data(), DType::kF32, {rows, kQuantizedCols}), settings,
         scale.encode, coded);
  return coded;
}

std::vector<float> decoded(QuantizedWeight& coded) {
  std::vector<float> values(static_cast<size_t>(coded.rows() * coded.cols()));
  coded.decode(TensorView::contiguous(values.data(), DType::kF32, {coded.rows(), coded.cols()}));
  return values;
}

// Block 0: a large element; block 1: zeros with one -0; block 2: too small for any scale.
std::vector<float> values_with_zero_scales() {
  std::vector<float> values(2 * kQuantizedCols, 0.0F);
  values[3] = 100.0F;
  values[16] = -0.0F;
  values[32] = 1e-6F;
  values[33] = -1e-6F;
  values[48] = 50.0F;
  return values;
}

TEST(QuantizedWeight, CompressedTensorsStoresOneEighthForZeroScales) {
  for (const MathMode math : {MathMode::kExact, MathMode::kFast}) {
    QuantizedWeight coded =
        encoded(compressed_tensors_nvfp4(), values_with_zero_scales(), {.math = math});
    EXPECT_EQ(coded.scales()[1], std::byte{0x20});
    EXPECT_EQ(coded.scales()[2], std::byte{0x20});
    EXPECT_EQ(coded.values()[8], std::byte{0x08});   // -0 keeps its sign.
    EXPECT_EQ(coded.values()[16], std::byte{0x80});  // Flushed to 0 and -0, not 7 and 15.
    EXPECT_EQ(decoded(coded)[32], 0.0F);
  }
}

TEST(QuantizedWeight, ModelOptTellsZeroBlocksFromUnderflow) {
  QuantizedWeight coded = encoded(modelopt_nvfp4(), values_with_zero_scales());
  EXPECT_EQ(coded.scales()[1], std::byte{0x38});
  EXPECT_EQ(coded.scales()[2], std::byte{0x01});
  EXPECT_EQ(coded.values()[16], std::byte{0x80});
}

TEST(QuantizedWeight, FourOverSixHasNoZeroScalesEither) {
  QuantizedWeight coded = encoded(compressed_tensors_nvfp4(), values_with_zero_scales(),
                                  {.scale_search = ScaleSearch::kFourOverSix});
  for (const std::byte scale : coded.scales()) EXPECT_NE(scale, std::byte{0});
}

TEST(QuantizedWeight, GlobalScalesPointInTheirConventionsDirection) {
  const float amax = 3.0F;
  EXPECT_EQ(tensor_scale(compressed_tensors_nvfp4(), {}, amax).stored, 2688.0F / amax);
  const TensorScale modelopt = tensor_scale(modelopt_nvfp4(), {}, amax);
  EXPECT_EQ(modelopt.stored, amax / 2688.0F);
  EXPECT_EQ(modelopt.encode, 2688.0F / amax);
  const EncodeSettings search = {.scale_search = ScaleSearch::kFourOverSix};
  EXPECT_EQ(tensor_scale(modelopt_nvfp4(), search, amax).stored, amax / 1536.0F);
  EXPECT_EQ(tensor_scale(compressed_tensors_mxfp4(), {}, amax).stored, 1.0F);
}

TEST(QuantizedWeight, GlobalScalesOfZeroAndTinyTensorsAreUsable) {
  for (const ConventionSpec* spec : {&compressed_tensors_nvfp4(), &modelopt_nvfp4()}) {
    for (const float amax : {0.0F, 1e-44F, 1e-38F, 3e38F}) {
      const float stored = tensor_scale(*spec, {}, amax).stored;
      EXPECT_TRUE(std::isfinite(stored) && stored > 0) << spec->info.name << " " << amax;
    }
  }
}

TEST(QuantizedWeight, ConventionsDecodeToNearlyTheSameValues) {
  const std::vector<float> values = weight_values("w", 4 * kQuantizedCols);
  for (const ConventionInfo& info : written_conventions()) {
    const ConventionSpec* spec = &convention_spec(info.id);
    QuantizedWeight coded = encoded(*spec, values);
    const std::vector<float> back = decoded(coded);
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_NEAR(back[i], values[i], 0.02) << spec->info.name << " " << i;
    }
  }
}

TEST(QuantizedWeight, ClipLimitsAreTheLargestCodesOfTheirBlocks) {
  std::vector<float> values(2 * kQuantizedCols, 1.0F);
  values[0] = -6.0F;
  values[40] = 448.0F;
  for (const ConventionSpec* spec : {&compressed_tensors_mxfp4(), &compressed_tensors_mxfp8()}) {
    const QuantizedWeight coded = encoded(*spec, values);
    const ClipLimits limits = coded.clip_limits();
    const auto limit = [&](int64_t row, int64_t block) {
      double value = 0;
      limits.of_blocks(row, block, std::span(&value, 1));
      return value;
    };
    EXPECT_EQ(limits.block_cols, 32);
    EXPECT_GE(limit(0, 0), 6.0);
    EXPECT_LT(limit(0, 0), 12.0);
    EXPECT_GE(limit(1, 0), 448.0);
  }
}

}  // namespace
}  // namespace narrowfloat
