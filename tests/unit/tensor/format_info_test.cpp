// The formats as data agree with the formats as types, and names parse back.
#include <gtest/gtest.h>

#include "expect_error.h"
#include "formats/registry.h"
#include "narrowfloat/quantize.h"

namespace narrowfloat {
namespace {

TEST(FormatInfo, RepeatsTheTraitsOfEveryFormat) {
  size_t index = 0;
  AllFormats::for_each([&]<BlockFormat Format>() {
    const FormatInfo& info = all_formats()[index];
    EXPECT_EQ(&format_info(Format::kId), &info);
    EXPECT_EQ(static_cast<size_t>(info.id), index++);
    EXPECT_EQ(info.name, Format::kName);
    EXPECT_EQ(info.description, Format::kDescription);
    EXPECT_EQ(info.element_bits, Format::Element::kBits);
    EXPECT_EQ(info.block_rows, Format::kBlockRows);
    EXPECT_EQ(info.block_cols, Format::kBlockCols);
    EXPECT_EQ(info.scale_type, Format::kScaleType);
    EXPECT_EQ(info.default_layout, Format::kDefaultLayout);
    EXPECT_EQ(info.has_global_scale, Format::kHasGlobalScale);
    EXPECT_EQ(info.has_row_scale, Format::kHasRowScale);
    EXPECT_TRUE(info.allows(info.default_layout));
    EXPECT_TRUE(info.allows(ScaleLayoutId::kLinear));
  });
  EXPECT_EQ(index, all_formats().size());
}

// The table of spec 1.5.
TEST(FormatInfo, AllowsSwizzledLayoutsForByteScalesAndMnMajorForRowBlocksOfF32) {
  for (const FormatInfo& info : all_formats()) {
    const bool has_bytes = info.scale_type != ScaleType::kF32;
    EXPECT_EQ(info.allows(ScaleLayoutId::kSwizzled128x4), has_bytes) << info.name;
    EXPECT_EQ(info.allows(ScaleLayoutId::kSwizzled8x4), has_bytes) << info.name;
    EXPECT_EQ(info.allows(ScaleLayoutId::kMnMajor), info.id == FormatId::kFp8Block1x128)
        << info.name;
  }
  EXPECT_EQ(format_info(FormatId::kFp8Block1x128).default_layout, ScaleLayoutId::kMnMajor);
  EXPECT_EQ(format_info(FormatId::kNvfp4).default_layout, ScaleLayoutId::kSwizzled128x4);
}

TEST(FormatInfo, RefusesNumbersThatAreNoFormat) {
  EXPECT_THROW((void)format_info(static_cast<FormatId>(7)), Error);
  EXPECT_THROW((void)format_info(static_cast<FormatId>(-1)), Error);
}

TEST(EnumNames, ParseBackToTheirValue) {
  for (const FormatInfo& info : all_formats()) EXPECT_EQ(parse_format(name(info.id)), info.id);
  for (int i = 0; i < 4; ++i) {
    const auto layout = static_cast<ScaleLayoutId>(i);
    EXPECT_EQ(parse_scale_layout(name(layout)), layout);
  }
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(static_cast<int>(parse_math_mode(name(static_cast<MathMode>(i)))), i);
  }
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(static_cast<int>(parse_ue8m0_rounding(name(static_cast<Ue8m0Rounding>(i)))), i);
  }
}

TEST(EnumNames, AreTheDocumentedOnes) {
  EXPECT_EQ(name(ScaleLayoutId::kLinear), "linear");
  EXPECT_EQ(name(ScaleLayoutId::kSwizzled128x4), "swizzled_128x4");
  EXPECT_EQ(name(ScaleLayoutId::kSwizzled8x4), "swizzled_8x4");
  EXPECT_EQ(name(ScaleLayoutId::kMnMajor), "mn_major");
  EXPECT_EQ(name(ScaleType::kE4M3), "E4M3");
  EXPECT_EQ(name(ScaleType::kUE8M0), "UE8M0");
  EXPECT_EQ(name(ScaleType::kF32), "F32");
  EXPECT_EQ(name(MathMode::kExact), "exact");
  EXPECT_EQ(name(MathMode::kFast), "fast");
  EXPECT_EQ(name(Ue8m0Rounding::kEven), "even");
  EXPECT_EQ(name(Fp8ScaleRule::kReciprocal), "reciprocal");
  EXPECT_EQ(name(Fp8ScaleRule::kReciprocalPow2), "reciprocal_pow2");
  EXPECT_EQ(name(Fp8ScaleRule::kAmaxDiv), "amax_div");
  EXPECT_EQ(name(Fp8ScaleRule::kPow2Ceil), "pow2_ceil");
}

TEST(EnumNames, RefuseOtherSpellingsAndListTheAccepted) {
  expect_invalid(
      "format: expected one of nvfp4, nvfp4_per_token, mxfp4, mxfp8, fp8_1x128, fp8_128x128, "
      "fp8_tensor, got \"NVFP4\"",
      [] { (void)parse_format("NVFP4"); });
  expect_invalid(
      "scale layout: expected one of linear, swizzled_128x4, swizzled_8x4, mn_major, got \"\"",
      [] { (void)parse_scale_layout(""); });
  expect_invalid("math mode: expected one of exact, fast, got \"exact \"",
                 [] { (void)parse_math_mode("exact "); });
  expect_invalid("UE8M0 rounding: expected one of up, floor, even, got \"ceil\"",
                 [] { (void)parse_ue8m0_rounding("ceil"); });
}

TEST(EnumNames, RefuseNumbersThatAreNoValue) {
  EXPECT_THROW((void)name(static_cast<ScaleType>(3)), Error);
  EXPECT_THROW((void)name(static_cast<ScaleLayoutId>(4)), Error);
  EXPECT_THROW((void)name(static_cast<MathMode>(2)), Error);
  EXPECT_THROW((void)name(static_cast<Ue8m0Rounding>(3)), Error);
  EXPECT_THROW((void)name(static_cast<Fp8ScaleRule>(4)), Error);
}

}  // namespace
}  // namespace narrowfloat
