// Views: strides, counts near 2^63, and their text.
#include <gtest/gtest.h>

#include "expect_error.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {
namespace {

constexpr int64_t kBig = int64_t{1} << 32;

TEST(TensorView, ContiguousHasRowMajorStrides) {
  const int data = 0;
  const auto view =
      TensorView::contiguous(&data, DType::kI32, {2, 3, 4, 5}, {DeviceType::kCuda, 1});
  EXPECT_EQ(view.rank, 4);
  EXPECT_EQ(view.strides, (std::array<int64_t, 4>{60, 20, 5, 1}));
  EXPECT_EQ(view.data, &data);
  EXPECT_EQ(view.device.index, 1);
  EXPECT_EQ(view.num_elements(), 120);
}

TEST(TensorView, OfRankZeroHasOneElement) {
  EXPECT_EQ(TensorView::contiguous(nullptr, DType::kF32, {}).num_elements(), 1);
}

TEST(TensorView, IsAbsentOnlyWithoutDataAndRank) {
  const float one = 1.0F;
  EXPECT_TRUE(TensorView{}.is_absent());
  EXPECT_FALSE(TensorView::contiguous(nullptr, DType::kF32, {0}).is_absent());
  EXPECT_FALSE(TensorView::contiguous(&one, DType::kF32, {}).is_absent());
}

TEST(TensorView, RefusesMoreThanFourExtentsAndNegativeOnes) {
  expect_invalid("shape: expected at most 4 extents, got 5", [] {
    (void)TensorView::contiguous(nullptr, DType::kF32, {1, 1, 1, 1, 1});
  });
  expect_invalid("shape: expected extents >= 0, got -2", [] {
    (void)TensorView::contiguous(nullptr, DType::kF32, {3, -2});
  });
}

TEST(TensorView, CountsUpTo63BitsAndThrowsBeyond) {
  const auto count = [](std::initializer_list<int64_t> shape) {
    return TensorView::contiguous(nullptr, DType::kU8, shape).num_elements();
  };
  EXPECT_EQ(count({INT64_MAX}), INT64_MAX);
  EXPECT_EQ(count({kBig, kBig / 4}), int64_t{1} << 62);
  expect_invalid("shape: U8[4294967296, 2147483648] has more than 2^63 elements", [&] {
    (void)count({kBig, kBig / 2});
  });
  expect_invalid("shape: U8[4294967296, 4294967296, 4294967296] has more than 2^63 elements", [&] {
    (void)count({kBig, kBig, kBig});
  });
}

TEST(TensorView, WithAnEmptyExtentHasNoElementsHoweverLargeTheOthers) {
  for (const auto& shape : {std::initializer_list<int64_t>{kBig, kBig, kBig, 0},
                            std::initializer_list<int64_t>{0, kBig, kBig, kBig}}) {
    EXPECT_EQ(TensorView::contiguous(nullptr, DType::kU8, shape).num_elements(), 0);
  }
}

TEST(TensorView, OfARankThatNoViewHasHasNoNumberOfElements) {
  for (const int rank : {-1, TensorView::kMaxRank + 1}) {
    TensorView view = TensorView::contiguous(nullptr, DType::kU8, {2, 3});
    view.rank = rank;
    EXPECT_THROW((void)view.num_elements(), Error) << rank;
  }
}

TEST(TensorView, DescribesItselfInMessages) {
  EXPECT_EQ(to_string(TensorView::contiguous(nullptr, DType::kBF16, {4, 96})), "BF16[4, 96]");
  EXPECT_EQ(to_string(TensorView::contiguous(nullptr, DType::kF32, {})), "F32[]");
}

TEST(Device, IsNamedByTypeAndIndex) {
  EXPECT_EQ(to_string(Device{}), "cpu");
  EXPECT_EQ(to_string(Device{DeviceType::kCuda, 3}), "cuda:3");
  EXPECT_FALSE((Device{DeviceType::kCuda, 0} == Device{DeviceType::kCuda, 1}));
}

}  // namespace
}  // namespace narrowfloat
