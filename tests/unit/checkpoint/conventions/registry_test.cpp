// Names of conventions and what follows from their data.
#include "checkpoint/conventions/convention.h"
#include "unit/checkpoint/test_files.h"

namespace narrowfloat {
namespace {

TEST(ConventionRegistry, IsInTheOrderOfTheEnumeration) {
  int index = 0;
  for (const ConventionInfo& info : all_conventions()) {
    EXPECT_EQ(static_cast<int>(info.id), index++);
    EXPECT_EQ(&convention_spec(info.id), all_convention_specs()[static_cast<size_t>(info.id)]);
    EXPECT_EQ(convention_info(info.id).name, info.name);
    EXPECT_EQ(parse_convention(info.name), info.id);
    EXPECT_EQ(convention_spec(info.id).quantization_config != nullptr, info.is_convert_target);
  }
  EXPECT_EQ(index, 12);
}

TEST(ConventionRegistry, PlainNamesMeanCompressedTensors) {
  EXPECT_EQ(parse_convention("nvfp4"), Convention::kNvfp4CompressedTensors);
  EXPECT_EQ(parse_convention("mxfp4"), Convention::kMxfp4CompressedTensors);
  EXPECT_EQ(parse_convention("mxfp8"), Convention::kMxfp8CompressedTensors);
}

TEST(ConventionRegistry, UnknownNamesListTheKnownOnes) {
  expect_error(
      ErrorKind::kInvalidArgument,
      "expected one of nvfp4-ct, nvfp4-modelopt, mxfp4-ct, mxfp8-ct, fp8-block, fp8-channel, "
      "fp8-tensor, fp8-channel-modelopt, fp8-tensor-modelopt, or nvfp4",
      [] { parse_convention("int4"); });
}

TEST(ConventionRegistry, CompanionsAreOfOneProducer) {
  const auto companion = [](Convention base, Convention wanted) {
    return companion_of(convention_spec(base), convention_spec(wanted));
  };
  EXPECT_EQ(companion(Convention::kNvfp4ModelOpt, Convention::kFp8Tensor), &modelopt_fp8_tensor());
  EXPECT_EQ(companion(Convention::kFp8ChannelModelOpt, Convention::kNvfp4CompressedTensors),
            &modelopt_nvfp4());
  EXPECT_EQ(companion(Convention::kNvfp4ModelOpt, Convention::kMxfp8CompressedTensors),
            &compressed_tensors_mxfp8());
  EXPECT_EQ(companion(Convention::kMxfp4CompressedTensors, Convention::kFp8TensorModelOpt),
            &fp8_tensor());
  for (const Convention wanted : {Convention::kMxfp4CompressedTensors, Convention::kFp8Block,
                                  Convention::kInt4CompressedTensors}) {
    EXPECT_EQ(companion(Convention::kNvfp4ModelOpt, wanted), nullptr);
  }
  EXPECT_EQ(companion(Convention::kFp8Block, Convention::kFp8Tensor), nullptr);
}

TEST(ConventionRegistry, PartsHaveTheirProducersNamesTypesAndShapes) {
  struct Part {
    std::string name;
    DType dtype;
    std::vector<int64_t> shape;
  };
  const std::vector<std::pair<Convention, std::vector<Part>>> cases = {
      {Convention::kNvfp4CompressedTensors,
       {{"x.weight_packed", DType::kU8, {130, 1440}},
        {"x.weight_scale", DType::kF8E4M3, {130, 180}},
        {"x.weight_global_scale", DType::kF32, {1}}}},
      {Convention::kNvfp4ModelOpt,
       {{"x.weight", DType::kU8, {130, 1440}},
        {"x.weight_scale", DType::kF8E4M3, {130, 180}},
        {"x.weight_scale_2", DType::kF32, {}}}},
      {Convention::kMxfp4CompressedTensors,
       {{"x.weight_packed", DType::kU8, {130, 1440}}, {"x.weight_scale", DType::kU8, {130, 90}}}},
      {Convention::kMxfp8CompressedTensors,
       {{"x.weight", DType::kF8E4M3, {130, 2880}}, {"x.weight_scale", DType::kU8, {130, 90}}}},
      {Convention::kFp8Block,
       {{"x.weight", DType::kF8E4M3, {130, 2880}}, {"x.weight_scale_inv", DType::kF32, {2, 23}}}},
      {Convention::kFp8Channel,
       {{"x.weight", DType::kF8E4M3, {130, 2880}}, {"x.weight_scale", DType::kF32, {130, 1}}}},
      {Convention::kFp8Tensor,
       {{"x.weight", DType::kF8E4M3, {130, 2880}}, {"x.weight_scale", DType::kF32, {1}}}},
      {Convention::kFp8ChannelModelOpt,
       {{"x.weight", DType::kF8E4M3, {130, 2880}}, {"x.weight_scale", DType::kF32, {130}}}},
      {Convention::kFp8TensorModelOpt,
       {{"x.weight", DType::kF8E4M3, {130, 2880}}, {"x.weight_scale", DType::kF32, {}}}},
  };
  for (const auto& [convention, parts] : cases) {
    const std::vector<TensorSpec> specs =
        stored_parts(convention_spec(convention), "x.", 130, 2880);
    ASSERT_EQ(specs.size(), parts.size());
    for (size_t i = 0; i < parts.size(); ++i) {
      EXPECT_EQ(specs[i].name, parts[i].name);
      EXPECT_EQ(specs[i].dtype, parts[i].dtype) << parts[i].name;
      EXPECT_EQ(specs[i].shape, parts[i].shape) << parts[i].name;
    }
  }
}

}  // namespace
}  // namespace narrowfloat
