// activate() as a whole: bytes against the public quantizers, gate orders, rows that are not named,
// values per expert, every input type, images of scales.
#include <cstring>
#include <numeric>

#include <gtest/gtest.h>

#include "narrowfloat/quantize.h"
#include "ops/activation/activation_math.h"
#include "support/coded_rows.h"
#include "support/environment.h"
#include "support/tensors.h"
#include "tensor/element_io.h"

namespace narrowfloat::testing {
namespace {

constexpr std::array kFormats{RowFormat::kBf16,         RowFormat::kFp32,  RowFormat::kFp8Static,
                              RowFormat::kFp8Group,     RowFormat::kMxfp8, RowFormat::kNvfp4,
                              RowFormat::kNvfp4PerToken};
constexpr BufferStyle kPoisoned{.poison = 0xFF};

bool takes_multiplier(RowFormat format) {
  return format == RowFormat::kFp8Static || format == RowFormat::kNvfp4;
}

Vector all_rows(int64_t rows) {
  std::vector<int32_t> map(static_cast<size_t>(rows));
  std::iota(map.begin(), map.end(), 0);
  return Vector::of(DType::kI32, map);
}

Matrix random_input(DType dtype, int64_t rows, int64_t cols, uint64_t seed) {
  return Matrix::filled({.dtype = dtype, .rows = rows, .cols = cols}, Fill::kNormalRows, seed);
}

// A call on F32 input [rows, 2 * inter] that works on all rows.
struct Call {
  Matrix input;
  Vector slot_to_row;
  RowsTensor output;
  ActivateArgs args;

  Call(RowFormat format, int64_t rows, int64_t inter, uint64_t seed = 1)
      : input(random_input(DType::kF32, rows, 2 * inter, seed)),
        slot_to_row(all_rows(rows)),
        output(format, rows, inter, kPoisoned) {
    args.input.values = input.view();
    args.slot_to_row = slot_to_row.view();
    args.format = format;
    args.output = output.view;
  }
};

// u and g lie in halves of a row, up first.
Matrix plain_result(const Call& call, DType dtype) {
  const Activation& activation = call.args.activation;
  const ActivationParams<float> params{activation.alpha.value, activation.beta.value,
                                       activation.limit_gate.value, activation.limit_up.value};
  const int64_t inter = call.input.shape().cols / 2;
  Matrix h({.dtype = dtype, .rows = call.input.shape().rows, .cols = inter});
  for (int64_t row = 0; row < h.num_rows(); ++row) {
    for (int64_t i = 0; i < inter; ++i) {
      const float u = call.input.at(row, i);
      const float g = call.input.at(row, inter + i);
      h.set(row, i, activated(activation.kind, u, g, params));
    }
  }
  return h;
}

// The rows as the public quantizer stores them.
std::vector<RowBytes> quantized_rows(const Matrix& h, const QuantizeTo& to) {
  const QuantizedTensor tensor = quantized(h, to);
  const auto slice = [&](const GuardedBuffer& buffer, int64_t row) {
    const int64_t width = buffer.size() / h.num_rows();
    return std::vector<uint8_t>(buffer.data() + row * width, buffer.data() + (row + 1) * width);
  };
  std::vector<RowBytes> rows;
  for (int64_t row = 0; row < h.num_rows(); ++row) {
    rows.push_back({.values = slice(tensor.values, row), .scales = {}, .row_scale = {}});
    if (to.format != FormatId::kFp8Tensor) rows.back().scales = slice(tensor.scales, row);
    if (to.format == FormatId::kNvfp4PerToken) {
      rows.back().row_scale = slice(tensor.global_scale, row);
    }
  }
  return rows;
}

std::vector<RowBytes> expected_rows(const Call& call) {
  constexpr auto kLinear = ScaleLayoutId::kLinear;
  const float multiplier = call.args.multiplier.value;
  switch (call.args.format) {
    case RowFormat::kFp8Static:
      return quantized_rows(
          plain_result(call, DType::kF32),
          {.format = FormatId::kFp8Tensor, .options = {.fp8_decode_scale = 1.0F / multiplier}});
    case RowFormat::kFp8Group:
      return quantized_rows(plain_result(call, DType::kF32),
                            {.format = FormatId::kFp8Block1x128, .layout = kLinear});
    case RowFormat::kMxfp8:
      return quantized_rows(plain_result(call, DType::kF32),
                            {.format = FormatId::kMxfp8, .layout = kLinear});
    case RowFormat::kNvfp4:
      return quantized_rows(
          plain_result(call, DType::kF32),
          {.format = FormatId::kNvfp4, .layout = kLinear, .options = {.encode_scale = multiplier}});
    case RowFormat::kNvfp4PerToken:
      return quantized_rows(plain_result(call, DType::kBF16),
                            {.format = FormatId::kNvfp4PerToken, .layout = kLinear});
    default:
      break;
  }
  const bool is_bf16 = call.args.format == RowFormat::kBf16;
  const Matrix h = plain_result(call, is_bf16 ? DType::kBF16 : DType::kF32);
  std::vector<RowBytes> rows;
  for (int64_t row = 0; row < h.num_rows(); ++row) {
    const auto* first = static_cast<const uint8_t*>(h.row(row));
    rows.push_back({.values = {first, first + h.shape().cols * (is_bf16 ? 2 : 4)},
                    .scales = {},
                    .row_scale = {}});
  }
  return rows;
}

class ActivateFormats : public ::testing::TestWithParam<RowFormat> {};

// 2880 has a short last group of 64 columns.
TEST_P(ActivateFormats, StoreTheBytesOfThePublicQuantizer) {
  for (const int64_t inter : {32, 544, 2880}) {
    for (const Activation& activation :
         {Activation::swiglu(), Activation::swiglu_oai(1.702F, 1, 7), Activation::situ(4, 25)}) {
      Call call(GetParam(), 3, inter, static_cast<uint64_t>(inter));
      call.args.activation = activation;
      if (takes_multiplier(GetParam())) call.args.multiplier = 24.0F;
      activate(call.args);
      const std::vector<RowBytes> expected = expected_rows(call);
      for (int64_t row = 0; row < 3; ++row) {
        EXPECT_EQ(row_bytes_of(call.output, row), expected[static_cast<size_t>(row)])
            << row << " of " << inter;
      }
      EXPECT_TRUE(call.output.intact());
    }
  }
}

TEST_P(ActivateFormats, GiveTheSameBytesInEveryGateOrder) {
  constexpr int64_t kInter = 672;
  Call up_gate(GetParam(), 2, kInter);
  activate(up_gate.args);
  for (const GateOrder order : {GateOrder::kGateUp, GateOrder::kInterleaved}) {
    Call other(GetParam(), 2, kInter);
    for (int64_t row = 0; row < 2; ++row) {
      for (int64_t i = 0; i < kInter; ++i) {
        const bool is_interleaved = order == GateOrder::kInterleaved;
        other.input.set(row, is_interleaved ? 2 * i : i, up_gate.input.at(row, kInter + i));
        other.input.set(row, is_interleaved ? 2 * i + 1 : kInter + i, up_gate.input.at(row, i));
      }
    }
    other.args.gate_order = order;
    activate(other.args);
    EXPECT_EQ(other.output.bytes(), up_gate.output.bytes()) << name(order);
  }
}

TEST_P(ActivateFormats, LeaveRowsThatNoSlotNames) {
  constexpr int64_t kInter = 160;
  Call all(GetParam(), 9, kInter);
  activate(all.args);
  Call some(GetParam(), 9, kInter);
  const Vector slots = Vector::of<int32_t>(DType::kI32, {7, -1, 0, -1, 3});
  some.args.slot_to_row = slots.view();
  // Not read either: the pages behind would fault, and NaN would show.
  for (const int64_t row : {1, 2, 4, 5, 6, 8}) some.input.poison_row(row, 0xFF);
  activate(some.args);
  const RowsTensor untouched(GetParam(), 9, kInter, kPoisoned);
  for (int64_t row = 0; row < 9; ++row) {
    const bool is_named = row == 7 || row == 0 || row == 3;
    EXPECT_EQ(row_bytes_of(some.output, row), row_bytes_of(is_named ? all.output : untouched, row))
        << row;
  }
}

// Tiles of 4 rows: experts 2, 0, 2.
TEST_P(ActivateFormats, TakeTheValuesOfTheRowsExpert) {
  constexpr int64_t kInter = 96;
  const Vector tiles = Vector::of<int32_t>(DType::kI32, {2, 0, 2, -5});
  const Vector alpha = Vector::of<float>(DType::kF32, {1.0F, 99.0F, 1.702F});
  const Vector limit = Vector::of<float>(DType::kF32, {0.5F, 99.0F, 7.0F});
  const Vector multiplier = Vector::of<float>(DType::kF32, {3.0F, 99.0F, 0.25F});
  Call call(GetParam(), 11, kInter);
  call.args.activation = Activation::swiglu_oai(5, 1, 5);
  call.args.activation.alpha = PerExpert(alpha.view());
  call.args.activation.limit_gate = PerExpert(limit.view());
  if (takes_multiplier(GetParam())) call.args.multiplier = PerExpert(multiplier.view());
  call.args.tile_to_expert = tiles.view();
  call.args.token_tile = 4;
  activate(call.args);
  for (const bool is_second : {false, true}) {
    Call one(GetParam(), 11, kInter);
    one.args.activation = Activation::swiglu_oai(is_second ? 1.0F : 1.702F, 1, 5);
    one.args.activation.limit_gate = is_second ? 0.5F : 7.0F;
    if (takes_multiplier(GetParam())) one.args.multiplier = is_second ? 3.0F : 0.25F;
    activate(one.args);
    for (int64_t row = 0; row < 11; ++row) {
      if ((row / 4 == 1) != is_second) continue;
      EXPECT_EQ(row_bytes_of(call.output, row), row_bytes_of(one.output, row)) << row;
    }
  }
}

TEST_P(ActivateFormats, StoreScalesInImagesOfBlocksByRows) {
  constexpr int64_t kInter = 416;
  Call dense(GetParam(), 5, kInter);
  activate(dense.args);
  Call image(GetParam(), 5, kInter);
  image.output = RowsTensor(GetParam(), 5, kInter, kPoisoned, ScaleOrder::kBlocksFirst);
  image.args.output = image.output.view;
  activate(image.args);
  for (int64_t row = 0; row < 5; ++row) {
    EXPECT_EQ(row_bytes_of(image.output, row), row_bytes_of(dense.output, row)) << row;
  }
  EXPECT_TRUE(image.output.intact());
}

TEST_P(ActivateFormats, DoNotDependOnThreadsOrTheCallersFloatingPointMode) {
  Call call(GetParam(), 40, 288);
  activate(call.args);
  const std::vector<uint8_t> expected = call.output.bytes();
  for (const unsigned control : {kFlushToZero | kDenormalsAreZero, kRoundUp, kRoundToZero}) {
    const ControlWord word(control);
    activate(call.args);
    EXPECT_EQ(call.output.bytes(), expected);
  }
  for (const int threads : {1, 2, 5}) {
    const ThreadLimit limit(threads);
    activate(call.args);
    EXPECT_EQ(call.output.bytes(), expected);
  }
}

TEST_P(ActivateFormats, DoNothingWithoutSlotsRowsOrColumns) {
  Call call(GetParam(), 4, 32);
  call.args.slot_to_row = TensorView::contiguous(nullptr, DType::kI32, {0});
  activate(call.args);
  EXPECT_EQ(call.output.bytes(), RowsTensor(GetParam(), 4, 32, kPoisoned).bytes());
  Call no_rows(GetParam(), 0, 32);
  EXPECT_NO_THROW(activate(no_rows.args));
  // A row without columns still has its row scale.
  Call no_cols(GetParam(), 2, 0);
  activate(no_cols.args);
  const bool has_row_scale = GetParam() == RowFormat::kNvfp4PerToken;
  EXPECT_EQ(no_cols.output.bytes(), std::vector<uint8_t>(has_row_scale ? 8 : 0, 0));
}

TEST_P(ActivateFormats, KeepNanAndInfinityInTheirRow) {
  constexpr int64_t kInter = 64;
  Call clean(GetParam(), 3, kInter);
  activate(clean.args);
  Call call(GetParam(), 3, kInter);
  for (int64_t col = 0; col < 2 * kInter; ++col) {
    call.input.set(1, col, col % 2 == 0 ? bits_float(0xFFC12345U) : __builtin_inff());
  }
  activate(call.args);
  EXPECT_EQ(row_bytes_of(call.output, 0), row_bytes_of(clean.output, 0));
  EXPECT_EQ(row_bytes_of(call.output, 2), row_bytes_of(clean.output, 2));
}

INSTANTIATE_TEST_SUITE_P(All, ActivateFormats, ::testing::ValuesIn(kFormats), [](const auto& test) {
  return std::string(test.param == RowFormat::kFp8Group ? "fp8_group" : name(test.param));
});

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
  Call call(RowFormat::kFp8Group, 1, 144);
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
    Call decoded(RowFormat::kBf16, kRows, kInter);
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
  Call call(RowFormat::kFp8Group, 2, 288);
  for (int64_t i = 0; i < 2 * 576; ++i) {
    call.input.set(i / 576, i % 576, narrow_input.at(i / 576, i % 576));
  }
  activate(call.args);
  const std::vector<uint8_t> expected = call.output.bytes();
  call.args.input.values = narrow_input.view();
  activate(call.args);
  EXPECT_EQ(call.output.bytes(), expected);
}

// P = 4 of at most 6 rows: scale images are [blocks, 4], whatever the views' strides say.
TEST(Activate, TakesTheExtentOfScaleImagesFromTheDevice) {
  constexpr int64_t kInter = 320;
  constexpr int64_t kMaxRows = 6;
  constexpr int64_t kUsed = 4;
  const auto make_input = [](int64_t image_rows) {
    RowsTensor input(RowFormat::kFp8Group, kMaxRows, 2 * kInter);
    Random random(5);
    for (uint8_t& code : input.values.span()) code = static_cast<uint8_t>(random.range(0, 0x60));
    for (int64_t block = 0; block < 5; ++block) {
      for (int64_t row = 0; row < kUsed; ++row) {
        input.scales.data<float>()[row + block * image_rows] = 0.25F + random.normal();
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
