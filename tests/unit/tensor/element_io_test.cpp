// Runs of elements to and from fp32.
#include "tensor/element_io.h"

#include <vector>

#include <gtest/gtest.h>

#include "expect_error.h"

namespace narrowfloat {
namespace {

TEST(Widen, ReadsEveryHighPrecisionTypeAndE4m3) {
  std::vector<float> out(3);
  const std::vector<uint16_t> bf16{0x3F80, 0x8000, 0x7F80};
  widen(DType::kBF16, bf16.data(), 3, out.data());
  EXPECT_EQ(out[0], 1.0F);
  EXPECT_EQ(float_bits(out[1]), 0x80000000U);
  EXPECT_EQ(float_bits(out[2]), 0x7F800000U);
  const std::vector<uint16_t> f16{0x3C00, 0x0001, 0xFC00};
  widen(DType::kF16, f16.data(), 3, out.data());
  EXPECT_EQ(out, (std::vector<float>{1.0F, 0x1p-24F, -std::numeric_limits<float>::infinity()}));
  const std::vector<uint8_t> e4m3{0x38, 0x01, 0xFE};
  widen(DType::kF8E4M3, e4m3.data(), 3, out.data());
  EXPECT_EQ(out, (std::vector<float>{1.0F, 0x1p-9F, -448.0F}));
  const std::vector<float> f32{0x1p-149F, -2.0F, bits_float(0x7F800001U)};
  widen(DType::kF32, f32.data(), 3, out.data());
  EXPECT_EQ(out[0], 0x1p-149F);
  EXPECT_EQ(float_bits(out[2]), 0x7F800001U);
}

TEST(Widen, AcceptsNothingWithoutPointers) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF8E4M3}) {
    EXPECT_NO_THROW(widen(dtype, nullptr, 0, nullptr));
  }
}

TEST(Narrow, RoundsOnceAndMakesNanCanonical) {
  const std::vector<float> in{1.0F + 0x1p-8F, 1e30F, bits_float(0xFFC00001U), -0.0F};
  std::vector<uint16_t> out(4);
  narrow(DType::kBF16, in.data(), 4, out.data());
  EXPECT_EQ(out, (std::vector<uint16_t>{0x3F80, 0x714A, 0x7FFF, 0x8000}));
  narrow(DType::kF16, in.data(), 4, out.data());
  EXPECT_EQ(out, (std::vector<uint16_t>{0x3C04, 0x7C00, 0x7FFF, 0x8000}));
  std::vector<float> wide(4);
  narrow(DType::kF32, in.data(), 4, wide.data());
  EXPECT_EQ(wide[0], in[0]);
  EXPECT_EQ(float_bits(wide[2]), 0x7FFFFFFFU);
}

TEST(RoundThrough, KeepsWhatA16BitTensorWouldHold) {
  std::vector<float> values{1.0F + 0x1p-8F, 1.0F + 0x1p-11F};
  round_through(DType::kBF16, values.data(), 2);
  EXPECT_EQ(values, (std::vector<float>{1.0F, 1.0F}));
  values = {1.0F + 0x1p-8F, 1.0F + 0x1p-11F};
  round_through(DType::kF16, values.data(), 2);
  EXPECT_EQ(values, (std::vector<float>{1.0F + 0x1p-8F, 1.0F}));
  values = {1.0F + 0x1p-20F, 0.0F};
  round_through(DType::kF32, values.data(), 2);
  EXPECT_EQ(values[0], 1.0F + 0x1p-20F);
}

TEST(ElementIo, RefusesOtherTypes) {
  float value = 0;
  expect_invalid("dtype: expected F32, F16, BF16 or F8_E4M3, got I32",
                 [&] { widen(DType::kI32, &value, 1, &value); });
  expect_invalid("dtype: expected F32, F16 or BF16, got F8_E4M3",
                 [&] { narrow(DType::kF8E4M3, &value, 1, &value); });
}

TEST(ElementPointer, CountsElements) {
  const std::vector<uint16_t> values(8);
  EXPECT_EQ(element_pointer(static_cast<const void*>(values.data()), DType::kBF16, 3), &values[3]);
  EXPECT_EQ(element_bytes(DType::kF32), 4);
  EXPECT_EQ(element_bytes(DType::kF8E4M3), 1);
}

}  // namespace
}  // namespace narrowfloat
