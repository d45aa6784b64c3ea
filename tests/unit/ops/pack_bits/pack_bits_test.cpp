// Packing by hand, and every check at its door.
#include "narrowfloat/pack_bits.h"

#include <array>

#include <gtest/gtest.h>

#include "support/expect_error.h"

namespace narrowfloat::testing {
namespace {

template <size_t kCount>
TensorView flat_view(const std::array<uint8_t, kCount>& values, DType dtype = DType::kU8) {
  return TensorView::contiguous(values.data(), dtype, {kCount});
}
template <size_t kCount>
TensorView flat_view(const std::array<int32_t, kCount>& values) {
  return TensorView::contiguous(values.data(), DType::kI32, {kCount});
}

// 1 0 1 1 0 0 1 0 | 1 1: 0xB2 0xC0 with the first element in bit 7, 0x4D 0x03 in bit 0.
constexpr std::array<uint8_t, 10> kElements{1, 0, 7, 1, 0, 0, 255, 0, 1, 1};

TEST(PackBits, TakesTheFirstElementAsTheHighestOrTheLowestBit) {
  std::array<uint8_t, 2> bytes{};
  pack_bits(flat_view(kElements), flat_view(bytes));
  EXPECT_EQ(bytes, (std::array<uint8_t, 2>{0xB2, 0xC0}));
  pack_bits(flat_view(kElements, DType::kBool), flat_view(bytes), BitOrder::kLittle);
  EXPECT_EQ(bytes, (std::array<uint8_t, 2>{0x4D, 0x03}));
}

TEST(SegmentPackBits, StartsEverySegmentInAByteOfItsOwn) {
  const std::array<int32_t, 5> offsets{0, 3, 3, 9, 10};
  std::array<uint8_t, 4> bytes{0xCC, 0xCC, 0xCC, 0xCC};
  std::array<int32_t, 5> starts{};
  ASSERT_EQ(segment_packed_bytes(10, 4), 4);
  segment_pack_bits(flat_view(kElements), flat_view(offsets), flat_view(bytes), flat_view(starts));
  EXPECT_EQ(starts, (std::array<int32_t, 5>{0, 1, 1, 2, 3}));
  // 101 | | 1 0 0 1 0 1 | 1, and a byte that nothing needs.
  EXPECT_EQ(bytes, (std::array<uint8_t, 4>{0xA0, 0x94, 0x80, 0xCC}));
}

TEST(SegmentPackBits, MayHaveNoSegments) {
  const std::array<int32_t, 1> offsets{0};
  std::array<uint8_t, 2> bytes{7, 7};
  std::array<int32_t, 1> starts{9};
  segment_pack_bits(flat_view(kElements), flat_view(offsets), flat_view(bytes), flat_view(starts));
  EXPECT_EQ(starts[0], 0);
  EXPECT_EQ(bytes[0], 7);
}

TEST(PackBits, RefusesWhatCannotWork) {
  std::array<uint8_t, 2> bytes{};
  const std::array<int32_t, 2> numbers{};
  expect_error(kInvalid, {"input", "BOOL or U8", "I32"},
               [&] { pack_bits(flat_view(numbers), flat_view(bytes)); });
  const std::array<uint8_t, 17> many{};
  expect_error(kInvalid, {"output", "3 values"},
               [&] { pack_bits(flat_view(many), flat_view(bytes)); });
  expect_error(kInvalid, {"output", "overlaps"}, [&] {
    std::array<uint8_t, 16> both{};
    pack_bits(flat_view(both), TensorView::contiguous(both.data(), DType::kU8, {2}));
  });
  expect_error(kInvalid, {"order", "kBig or kLittle", "2"}, [&] {
    pack_bits(flat_view(kElements), flat_view(bytes), static_cast<BitOrder>(2));
  });
}

TEST(SegmentPackBits, RefusesWhatCannotWork) {
  std::array<uint8_t, 4> bytes{};
  std::array<int32_t, 3> starts{};
  const auto refused = [&](const std::vector<std::string>& words,
                           const std::array<int32_t, 3>& offsets) {
    expect_error(kInvalid, words, [&] {
      segment_pack_bits(flat_view(kElements), flat_view(offsets), flat_view(bytes),
                        flat_view(starts));
    });
  };
  refused({"offsets", "ascending", "2 after 5"}, {0, 5, 2});
  refused({"offsets", "[0, 10]", "11"}, {0, 5, 11});
  refused({"offsets", "-1"}, {-1, 5, 7});
  const std::array<int32_t, 3> offsets{0, 5, 10};
  std::array<uint8_t, 2> short_output{};
  expect_error(kInvalid, {"output", "at least 3 bytes", "U8[2]"}, [&] {
    segment_pack_bits(flat_view(kElements), flat_view(offsets), flat_view(short_output),
                      flat_view(starts));
  });
  std::array<int32_t, 2> few{};
  expect_error(kInvalid, {"output_offsets", "3 values"}, [&] {
    segment_pack_bits(flat_view(kElements), flat_view(offsets), flat_view(bytes), flat_view(few));
  });
  expect_error(kInvalid, {"elements, segments", ">= 0"}, [] { segment_packed_bytes(-1, 2); });
}

}  // namespace
}  // namespace narrowfloat::testing
