// activate() by what it reads: plain, bf16, double and FP8 input with its group scales, scales
// whose extent is known on the device only, exact cases.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include <gtest/gtest.h>

#include "activation_call.h"
#include "formats/minifloat.h"

namespace narrowfloat::testing {
namespace {

// An activation that is not gated reads as many columns as it writes.
TEST(Activate, ReadsOneHalfWithoutAGate) {
  const Matrix input = random_input(DType::kF32, 2, 600, 9);
  const Vector slots = all_rows(2);
  const RowsTensor output(RowFormat::kFp32, 2, 600, kPoisoned);
  for (const GateOrder order : {GateOrder::kUpGate, GateOrder::kInterleaved}) {
    activate({.input = {.values = input.view()},
              .activation = Activation::plain(ActivationKind::kRelu2),
              .gate_order = order,
              .slot_to_row = slots.view(),
              .format = RowFormat::kFp32,
              .output = output.view});
    for (int64_t i = 0; i < 1200; ++i) {
      const float x = std::max(input.at(i / 600, i % 600), 0.0F);
      ASSERT_EQ(output.values.span<float>()[static_cast<size_t>(i)], x * x);
    }
  }
}

// sigma of 2^14 * g is 0 or 1, 448 in the group makes its scale 1 (moe spec 12.4): integers.
TEST(Activate, IsExactOnIntegersWithASteepSlope) {
  ActivationCall call(RowFormat::kFp8Group, 1, 144);
  call.args.activation.alpha = 0x1p14F;
  for (int64_t i = 0; i < 144; ++i) {
    call.input.set(0, i, static_cast<float>(i % 4 + 1));
    call.input.set(0, 144 + i, i % 2 == 0 ? 2.0F : -3.0F);
  }
  call.input.set(0, 144 + 5, 224.0F);   // u = 2
  call.input.set(0, 144 + 130, 64.0F);  // u = 3: the maximum of the short group.
  activate(call.args);
  const RowBytes row = row_bytes_of(call.output, 0);
  std::array<float, 2> scales{};
  ASSERT_EQ(row.scales.size(), sizeof(scales));
  std::memcpy(scales.data(), row.scales.data(), sizeof(scales));
  EXPECT_EQ(scales[0], 1.0F);
  EXPECT_EQ(scales[1], 1.0F / (448.0F / 192.0F));
  EXPECT_EQ(row.values[5], 0x7E);                // 448
  EXPECT_EQ(row.values[0], E4M3::encode(2.0F));  // 1 * 2
  EXPECT_EQ(row.values[2], E4M3::encode(6.0F));  // 3 * 2
  EXPECT_EQ(row.values[1] & 0x7F, 0);            // A negative gate.
  EXPECT_EQ(row.values[130], 0x7E);
}

// 1 + 2^-8 is halfway between two bf16 numbers; fp32 in between would lose the 2^-40 above it.
TEST(Activate, RoundsDoubleInputOnce) {
  std::array<double, 32> x{};
  x.fill(1.0);
  x[1] = 1.0 + 0x1p-8 + 0x1p-40;
  x[2] = 1.0 + 0x1p-8 - 0x1p-40;
  x[3] = 1.0 + 0x1p-24 + 0x1p-50;
  const Vector slots = all_rows(1);
  const auto run = [&](const RowsTensor& output, RowFormat format) {
    activate({.input = {.values = TensorView::contiguous(x.data(), DType::kF64, {1, 32})},
              .activation = Activation::plain(ActivationKind::kIdentity),
              .slot_to_row = slots.view(),
              .format = format,
              .output = output.view});
  };
  const RowsTensor bf16(RowFormat::kBf16, 1, 32, kPoisoned);
  run(bf16, RowFormat::kBf16);
  EXPECT_EQ(bf16.values.span<uint16_t>()[1], 0x3F81);
  EXPECT_EQ(bf16.values.span<uint16_t>()[2], 0x3F80);
  const RowsTensor fp32(RowFormat::kFp32, 1, 32, kPoisoned);
  run(fp32, RowFormat::kFp32);
  EXPECT_EQ(fp32.values.span<float>()[1], 1.0F + 0x1p-8F);
  EXPECT_EQ(fp32.values.span<float>()[3], 1.0F + 0x1p-23F);
  // The row's maximum is that of the bf16 values, 1 + 2^-7.
  const RowsTensor per_token(RowFormat::kNvfp4PerToken, 1, 32, kPoisoned);
  run(per_token, RowFormat::kNvfp4PerToken);
  const float encode = 2688.0F / (1.0F + 0x1p-7F);
  EXPECT_EQ(per_token.row_scale.span<float>()[0], 1.0F / encode);
}

TEST(Activate, ComputesDoubleInputInDouble) {
  const Matrix input = random_input(DType::kF32, 1, 256, 4);
  std::vector<double> wide(256);
  for (int64_t i = 0; i < 256; ++i) wide[static_cast<size_t>(i)] = input.at(0, i);
  const Vector slots = all_rows(1);
  const RowsTensor output(RowFormat::kFp32, 1, 128, kPoisoned);
  activate({.input = {.values = TensorView::contiguous(wide.data(), DType::kF64, {1, 256})},
            .activation = Activation::swiglu_oai(1.702F, 1, 7),
            .slot_to_row = slots.view(),
            .format = RowFormat::kFp32,
            .output = output.view});
  for (size_t i = 0; i < 128; ++i) {
    const double u = std::clamp(wide[i], -7.0, 7.0);
    const double g = std::min(wide[128 + i], 7.0);
    const double alpha = static_cast<double>(1.702F);
    const double h = g / (1.0 + std::exp(-alpha * g)) * (u + 1.0);
    ASSERT_EQ(output.values.span<float>()[i], static_cast<float>(h)) << i;
  }
}

// Group g of a row covers columns 128 g and on of the whole row: the border between u and g, at
// 144, lies inside one.
TEST(Activate, DecodesFp8InputWithItsGroupScales) {
  constexpr int64_t kInter = 144;
  constexpr int64_t kRows = 3;
  for (const GateOrder order : {GateOrder::kUpGate, GateOrder::kGateUp, GateOrder::kInterleaved}) {
    ActivationCall decoded(RowFormat::kBf16, kRows, kInter);
    RowsTensor coded(RowFormat::kFp8Group, kRows, 2 * kInter, {}, ScaleOrder::kBlocksFirst);
    Random random(8);
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t block = 0; block < 3; ++block) {
        coded.scales.data<float>()[block * kRows + row] = 0.1F * random.normal();
      }
      for (int64_t col = 0; col < 2 * kInter; ++col) {
        const auto code = static_cast<uint8_t>(random.range(0, 0x60) | random.range(0, 1) << 7);
        coded.values.data()[row * 2 * kInter + col] = code;
        decoded.input.set(row, col,
                          E4M3::decode(code) * coded.scales.data<float>()[col / 128 * kRows + row]);
      }
    }
    decoded.args.gate_order = order;
    activate(decoded.args);
    const std::vector<uint8_t> expected = decoded.output.bytes();
    decoded.args.input = coded.view;
    activate(decoded.args);
    EXPECT_EQ(decoded.output.bytes(), expected);
  }
}

TEST(Activate, WidensBf16Input) {
  const Matrix narrow_input = random_input(DType::kBF16, 2, 576, 6);
  ActivationCall call(RowFormat::kFp8Group, 2, 288);
  for (int64_t i = 0; i < 2 * 576; ++i) {
    call.input.set(i / 576, i % 576, narrow_input.at(i / 576, i % 576));
  }
  activate(call.args);
  const std::vector<uint8_t> expected = call.output.bytes();
  call.args.input.values = narrow_input.view();
  activate(call.args);
  EXPECT_EQ(call.output.bytes(), expected);
}

// P = 4 of at most 6 rows: scales are [blocks, 4], whatever the views' strides say.
TEST(Activate, TakesTheExtentOfColumnMajorScalesFromTheDevice) {
  constexpr int64_t kInter = 320;
  constexpr int64_t kMaxRows = 6;
  constexpr int64_t kUsed = 4;
  const auto make_input = [](int64_t scale_rows) {
    RowsTensor input(RowFormat::kFp8Group, kMaxRows, 2 * kInter);
    Random random(5);
    for (uint8_t& code : input.values.span()) code = static_cast<uint8_t>(random.range(0, 0x60));
    for (int64_t block = 0; block < 5; ++block) {
      for (int64_t row = 0; row < kUsed; ++row) {
        input.scales.data<float>()[row + block * scale_rows] = 0.25F + random.normal();
      }
    }
    return input;
  };
  const Vector slots = Vector::of<int32_t>(DType::kI32, {3, -1, 0, 1});
  const Vector used = Vector::of<int32_t>(DType::kI32, {kUsed});
  const RowsTensor in_small = make_input(kUsed);
  const RowsTensor in_large = make_input(kMaxRows);
  const RowsTensor small(RowFormat::kFp8Group, kMaxRows, kInter, kPoisoned);
  const RowsTensor large(RowFormat::kFp8Group, kMaxRows, kInter, kPoisoned);
  ActivateArgs args{.input = in_large.view,
                    .slot_to_row = slots.view(),
                    .format = RowFormat::kFp8Group,
                    .output = large.view};
  args.input.scales.strides = {1, kMaxRows};
  args.output.scales.strides = {1, kMaxRows};
  activate(args);
  args.input = in_small.view;
  args.input.scales.strides = {77, -5};
  args.output = small.view;
  args.output.scales.strides = {0, 0};
  args.num_rows = used.view();
  activate(args);
  EXPECT_EQ(small.values.copy(), large.values.copy());
  for (int64_t i = 0; i < kMaxRows * 3; ++i) {
    const int64_t row = i % kUsed;
    const int64_t block = i / kUsed;
    const bool is_written = block < 3 && row != 2;
    const uint32_t actual = small.scales.data<uint32_t>()[i];
    EXPECT_EQ(actual,
              is_written ? large.scales.data<uint32_t>()[row + block * kMaxRows] : 0xFFFFFFFFU)
        << i;
  }
}

}  // namespace
}  // namespace narrowfloat::testing
