// activate() into every row format: bytes against the public quantizers, gate orders, rows that are
// not named, values per expert, places of scales.
#include <array>

#include <gtest/gtest.h>

#include "activation_call.h"
#include "narrowfloat/quantize.h"
#include "ops/activation/activation_checks.h"
#include "ops/activation/activation_math.h"
#include "support/environment.h"

namespace narrowfloat::testing {
namespace {

constexpr std::array kFormats{RowFormat::kBf16,          RowFormat::kFp32,    RowFormat::kFp8Static,
                              RowFormat::kFp8Group,      RowFormat::kMxfp8,   RowFormat::kNvfp4,
                              RowFormat::kNvfp4PerToken, RowFormat::kFp8Token};

bool takes_multiplier(RowFormat format) {
  return format == RowFormat::kFp8Static || format == RowFormat::kNvfp4;
}

// u and g lie in halves of a row, up first.
Matrix plain_result(const ActivationCall& call, DType dtype) {
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

// As if each row were a tensor.
std::vector<RowBytes> quantized_each(const Matrix& h) {
  std::vector<RowBytes> rows;
  for (int64_t row = 0; row < h.num_rows(); ++row) {
    Matrix one({.dtype = h.shape().dtype, .rows = 1, .cols = h.shape().cols});
    for (int64_t col = 0; col < h.shape().cols; ++col) one.set(0, col, h.at(row, col));
    const QuantizedTensor tensor = quantized(one, {.format = FormatId::kFp8Tensor});
    rows.push_back(
        {.values = tensor.values.copy(), .scales = {}, .row_scale = tensor.scales.copy()});
  }
  return rows;
}

std::vector<RowBytes> expected_rows(const ActivationCall& call) {
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
    case RowFormat::kFp8Token:
      return quantized_each(plain_result(call, DType::kBF16));
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
      ActivationCall call(GetParam(), 3, inter, static_cast<uint64_t>(inter));
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
  ActivationCall up_gate(GetParam(), 2, kInter);
  activate(up_gate.args);
  for (const GateOrder order : {GateOrder::kGateUp, GateOrder::kInterleaved}) {
    ActivationCall other(GetParam(), 2, kInter);
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
  ActivationCall all(GetParam(), 9, kInter);
  activate(all.args);
  ActivationCall some(GetParam(), 9, kInter);
  const Vector slots = Vector::of<int32_t>(DType::kI32, {7, -1, 0, -1, 3});
  some.args.slot_to_row = slots.view();
  // These rows are not read either: the pages after them would fault, and NaN would show.
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
  ActivationCall call(GetParam(), 11, kInter);
  call.args.activation = Activation::swiglu_oai(5, 1, 5);
  call.args.activation.alpha = PerExpert(alpha.view());
  call.args.activation.limit_gate = PerExpert(limit.view());
  if (takes_multiplier(GetParam())) call.args.multiplier = PerExpert(multiplier.view());
  call.args.tile_to_expert = tiles.view();
  call.args.token_tile = 4;
  activate(call.args);
  for (const bool is_second : {false, true}) {
    ActivationCall one(GetParam(), 11, kInter);
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

TEST_P(ActivateFormats, StoreScalesOfBlocksByRows) {
  constexpr int64_t kInter = 416;
  ActivationCall dense(GetParam(), 5, kInter);
  activate(dense.args);
  ActivationCall column_major(GetParam(), 5, kInter);
  column_major.output = RowsTensor(GetParam(), 5, kInter, kPoisoned, ScaleOrder::kBlocksFirst);
  column_major.args.output = column_major.output.view;
  activate(column_major.args);
  for (int64_t row = 0; row < 5; ++row) {
    EXPECT_EQ(row_bytes_of(column_major.output, row), row_bytes_of(dense.output, row)) << row;
  }
  EXPECT_TRUE(column_major.output.intact());
}

// Some implementations index scales with 32 bits: the problem says where that is not enough.
TEST(ActivationProblems, TellStridesBeyond32Bits) {
  const ActivationCall call(RowFormat::kFp8Group, 3, 256);
  // Nothing is written; so much memory after an address overlaps nothing only if there is none.
  constexpr uintptr_t kNowhere = uintptr_t{1} << 48;
  const auto is_wide = [&](std::array<int64_t, 2> strides, int64_t rows) {
    ActivateArgs args = call.args;
    args.input.values.shape[0] = rows;
    args.output.values.shape[0] = rows;
    args.output.scales.shape[0] = rows;
    args.slot_to_row.shape[0] = rows;
    args.output.scales.strides = {strides[0], strides[1]};
    // NOLINTNEXTLINE(performance-no-int-to-ptr): nobody follows it.
    args.output.scales.data = reinterpret_cast<void*>(kNowhere);
    return lower(args).problem.has_wide_strides;
  };
  constexpr int64_t kLimit = int64_t{1} << 32;
  EXPECT_FALSE(is_wide({2, 1}, 3));
  EXPECT_FALSE(is_wide({1, kLimit - 1}, 3));
  EXPECT_TRUE(is_wide({1, kLimit}, 3));
  EXPECT_TRUE(is_wide({kLimit, 1}, 3));
  // Along one row nothing is stepped.
  EXPECT_FALSE(is_wide({kLimit, 1}, 1));
}

TEST_P(ActivateFormats, DoNotDependOnThreadsOrTheCallersFloatingPointMode) {
  ActivationCall call(GetParam(), 40, 288);
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
  ActivationCall call(GetParam(), 4, 32);
  call.args.slot_to_row = TensorView::contiguous(nullptr, DType::kI32, {0});
  activate(call.args);
  EXPECT_EQ(call.output.bytes(), RowsTensor(GetParam(), 4, 32, kPoisoned).bytes());
  ActivationCall no_rows(GetParam(), 0, 32);
  EXPECT_NO_THROW(activate(no_rows.args));
  // A row without columns still has its row scale.
  ActivationCall no_cols(GetParam(), 2, 0);
  activate(no_cols.args);
  const auto& row_scale = no_cols.output.view.row_scale;
  ASSERT_EQ(no_cols.output.bytes().size(), row_scale.is_absent() ? 0 : 8);
  for (int64_t row = 0; row < 2 && !row_scale.is_absent(); ++row) {
    EXPECT_EQ(static_cast<const float*>(row_scale.data)[row],
              GetParam() == RowFormat::kFp8Token ? 1.0F : 0.0F);
  }
}

TEST_P(ActivateFormats, KeepNanAndInfinityInTheirRow) {
  constexpr int64_t kInter = 64;
  ActivationCall clean(GetParam(), 3, kInter);
  activate(clean.args);
  ActivationCall call(GetParam(), 3, kInter);
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

}  // namespace
}  // namespace narrowfloat::testing
