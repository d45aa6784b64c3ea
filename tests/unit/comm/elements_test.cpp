// Leaves of the element types: widening is exact, and narrowing gives one NaN.
#include "comm/elements.h"

#include <vector>

#include <gtest/gtest.h>

namespace narrowfloat {
namespace {

template <class Elements>
void expect_round_trip() {
  std::vector<uint16_t> all(0x10000);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  for (int64_t leaf = 0; leaf < 0x10000 / kLeafElements; ++leaf) {
    float x[kLeafElements];
    Elements::widen(Elements::load(all.data(), leaf), x);
    const auto narrowed = Elements::narrow(x);
    for (int i = 0; i < kLeafElements; ++i) {
      const uint16_t element = all[static_cast<size_t>(leaf * kLeafElements + i)];
      const auto back = static_cast<uint16_t>(narrowed.words[i / 2] >> (i % 2 * 16));
      const float value = Elements::to_float(element);
      ASSERT_EQ(float_bits(x[i]), float_bits(value));
      ASSERT_EQ(back, value == value ? element : 0x7FFF);
      ASSERT_EQ(float_bits(Elements::element(all.data(), leaf * kLeafElements + i)),
                float_bits(value));
    }
  }
}

TEST(HostElements, WidenAndNarrowEvery16BitElement) {
  expect_round_trip<HostElements<DType::kBF16>>();
  expect_round_trip<HostElements<DType::kF16>>();
}

TEST(HostElements, KeepFp32AndMakeItsNansCanonical) {
  using Elements = HostElements<DType::kF32>;
  const Leaf32 leaf{{0, 1, 0x3F800000U, 0xFF800000U, 0x7F800001U, 0xFFC00000U, 0x80000000U, 7}};
  float x[kLeafElements];
  Elements::widen(leaf, x);
  const Leaf32 narrowed = Elements::narrow(x);
  for (int i = 0; i < kLeafElements; ++i) {
    const bool is_nan = i == 4 || i == 5;
    EXPECT_EQ(narrowed.words[i], is_nan ? 0x7FFFFFFFU : leaf.words[i]) << i;
  }
}

TEST(HostElements, RoundLikeNarrow) {
  EXPECT_EQ(HostElements<DType::kBF16>::round(1.0F + 0x1p-8F), 1.0F);
  EXPECT_EQ(HostElements<DType::kBF16>::round(1.0F + 0x1.8p-8F), 1.0F + 0x1p-7F);
  EXPECT_EQ(HostElements<DType::kF16>::round(65520.0F), __builtin_inff());
  EXPECT_EQ(HostElements<DType::kF32>::round(0x1p-140F), 0x1p-140F);
}

}  // namespace
}  // namespace narrowfloat
