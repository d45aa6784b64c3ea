// The table of element types: names and sizes of the safetensors format.
#include <map>

#include <gtest/gtest.h>

#include "expect_error.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {
namespace {

const std::map<DType, std::pair<std::string, int>> kExpected{
    {DType::kBool, {"BOOL", 8}},
    {DType::kF4, {"F4", 4}},
    {DType::kF6E2M3, {"F6_E2M3", 6}},
    {DType::kF6E3M2, {"F6_E3M2", 6}},
    {DType::kU8, {"U8", 8}},
    {DType::kI8, {"I8", 8}},
    {DType::kF8E5M2, {"F8_E5M2", 8}},
    {DType::kF8E4M3, {"F8_E4M3", 8}},
    {DType::kF8E8M0, {"F8_E8M0", 8}},
    {DType::kF8E4M3Fnuz, {"F8_E4M3FNUZ", 8}},
    {DType::kF8E5M2Fnuz, {"F8_E5M2FNUZ", 8}},
    {DType::kI16, {"I16", 16}},
    {DType::kU16, {"U16", 16}},
    {DType::kF16, {"F16", 16}},
    {DType::kBF16, {"BF16", 16}},
    {DType::kI32, {"I32", 32}},
    {DType::kU32, {"U32", 32}},
    {DType::kF32, {"F32", 32}},
    {DType::kC64, {"C64", 64}},
    {DType::kF64, {"F64", 64}},
    {DType::kI64, {"I64", 64}},
    {DType::kU64, {"U64", 64}}};

TEST(DTypeTable, HasTheNamesAndSizesOfSafetensors) {
  EXPECT_EQ(kExpected.size(), static_cast<size_t>(kNumDTypes));
  for (const auto& [dtype, expected] : kExpected) {
    EXPECT_EQ(name(dtype), expected.first);
    EXPECT_EQ(bits(dtype), expected.second) << expected.first;
  }
}

TEST(DTypeTable, ParsesEveryNameAndOnlyThose) {
  for (const auto& [dtype, expected] : kExpected) EXPECT_EQ(parse_dtype(expected.first), dtype);
  for (const std::string text : {"", "bf16", "F8", "BF16 ", "F32\n", "F128"}) {
    EXPECT_EQ(parse_dtype(text), std::nullopt) << text;
  }
}

TEST(DTypeTable, RefusesNumbersThatAreNoDType) {
  expect_invalid("dtype: 22 is not a DType", [] { (void)bits(static_cast<DType>(22)); });
  expect_invalid("dtype: -1 is not a DType", [] { (void)name(static_cast<DType>(-1)); });
}

}  // namespace
}  // namespace narrowfloat
