// dequantize() against the formulas of spec 7 on every code and scale byte, and every check at its
// door.
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <ostream>

#include <gtest/gtest.h>

#include "base/host_device.h"
#include "support/environment.h"
#include "support/expect_error.h"
#include "support/tensors.h"

namespace narrowfloat::testing {
namespace {

constexpr uint32_t kNanBits = 0x7FFFFFFFU;

float e2m1_value(int code) {
  constexpr std::array<float, 8> kValues{0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
  const float magnitude = kValues[static_cast<size_t>(code & 7)];
  return (code & 8) != 0 ? -magnitude : magnitude;
}

float e4m3_value(int code) {
  if ((code & 0x7F) == 0x7F) return std::numeric_limits<float>::quiet_NaN();
  const int exponent = code >> 3 & 0xF;
  const auto mantissa = static_cast<float>(code & 7);
  const float magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8.0F + mantissa, exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

float ue8m0_value(int byte) {
  return byte == 255 ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0F, byte - 127);
}

void expect_bits(float expected, float actual, const std::string& what) {
  const uint32_t bits = std::isnan(expected) ? kNanBits : float_bits(expected);
  ASSERT_EQ(bits, float_bits(actual)) << what;
}

// One row for each of the 256 scale bytes; all codes in each block.
QuantizedTensor all_codes(FormatId format) {
  const FormatInfo& info = format_info(format);
  const int64_t cols = info.element_bits == 4 ? 32 : 256;
  QuantizedTensor tensor(
      quantized_layout(format, 256, cols, {.scale_layout = ScaleLayoutId::kLinear}));
  for (int64_t row = 0; row < 256; ++row) {
    for (int64_t i = 0; i < tensor.values.size() / 256; ++i) {
      uint8_t& byte = tensor.values.data()[row * (tensor.values.size() / 256) + i];
      byte =
          static_cast<uint8_t>(info.element_bits == 4 ? (i * 2 % 16) | (i * 2 + 1) % 16 << 4 : i);
    }
    const int64_t blocks = tensor.layout.scale_blocks;
    std::memset(tensor.scales.data() + row * blocks, static_cast<int>(row),
                static_cast<size_t>(blocks));
  }
  return tensor;
}

TEST(Dequantize, Nvfp4ScalesFirst) {
  for (const float global : {1.0F, 1.0F / 3.0F, 0x1.23456p-20F, 0x1p-130F, 1e30F}) {
    const QuantizedTensor tensor = all_codes(FormatId::kNvfp4);
    tensor.global_scale.data<float>()[0] = global;
    const Matrix output = dequantized(tensor.view);
    for (int64_t row = 0; row < 256; ++row) {
      const float factor = e4m3_value(static_cast<int>(row)) * global;
      for (int64_t col = 0; col < 32; ++col) {
        expect_bits(e2m1_value(static_cast<int>(col % 16)) * factor, output.at(row, col),
                    std::to_string(row) + ", " + std::to_string(col));
      }
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Dequantize, DividesByAGlobalScaleStoredAsADivisor) {
  const QuantizedTensor tensor = all_codes(FormatId::kNvfp4);
  tensor.global_scale.data<float>()[0] = 7.0F;
  const Matrix output({.dtype = DType::kF32, .rows = 256, .cols = 32});
  dequantize(tensor.view, output.view(), {.global_scale_divides = true});
  for (int64_t row = 0; row < 256; ++row) {
    const float factor = e4m3_value(static_cast<int>(row)) / 7.0F;
    for (int64_t col = 0; col < 32; ++col) {
      expect_bits(e2m1_value(static_cast<int>(col % 16)) * factor, output.at(row, col), "");
    }
    if (HasFatalFailure()) return;
  }
}

TEST(Dequantize, MxOfEveryScaleByteAndCode) {
  for (const FormatId format : {FormatId::kMxfp4, FormatId::kMxfp8}) {
    const QuantizedTensor tensor = all_codes(format);
    const Matrix output = dequantized(tensor.view);
    for (int64_t row = 0; row < 256; ++row) {
      const float scale = ue8m0_value(static_cast<int>(row));
      for (int64_t col = 0; col < output.shape().cols; ++col) {
        const int code = static_cast<int>(col);
        const float value = format == FormatId::kMxfp4 ? e2m1_value(code % 16) : e4m3_value(code);
        expect_bits(value * scale, output.at(row, col),
                    std::to_string(row) + ", " + std::to_string(col));
      }
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Dequantize, Fp8TakesTheScaleOfEachTile) {
  const auto layout = quantized_layout(FormatId::kFp8Block128x128, 130, 272);
  QuantizedTensor tensor(layout);
  for (int64_t i = 0; i < tensor.values.size(); ++i) {
    tensor.values.data()[i] = static_cast<uint8_t>(i * 7);
  }
  for (size_t i = 0; i < 6; ++i) {
    tensor.scales.span<float>()[i] = 1.0F / static_cast<float>(i + 3);
  }
  const Matrix output = dequantized(tensor.view);
  for (int64_t row = 0; row < 130; ++row) {
    for (int64_t col = 0; col < 272; ++col) {
      const float scale =
          tensor.scales.span<float>()[static_cast<size_t>(row / 128 * 3 + col / 128)];
      expect_bits(e4m3_value(tensor.values.data()[row * 272 + col]) * scale, output.at(row, col),
                  std::to_string(row) + ", " + std::to_string(col));
    }
    if (HasFatalFailure()) return;
  }
}

// [rows] is shared by the batches, [batch, 1] is one for each batch, per token has one for each
// row.
TEST(Dequantize, GlobalScalesRangeOverRowsOrBatches) {
  QuantizedTensor tensor(quantized_layout(FormatId::kNvfp4, 3, 16,
                                          {.scale_layout = ScaleLayoutId::kLinear, .batch = 3}));
  std::memset(tensor.values.data(), 0x22, static_cast<size_t>(tensor.values.size()));
  std::memset(tensor.scales.data(), 0x38, static_cast<size_t>(tensor.scales.size()));
  const Vector factors = Vector::of<float>(DType::kF32, {2, 3, 5});
  const Matrix output({.dtype = DType::kF32, .batch = 3, .rows = 3, .cols = 16});
  const auto decode = [&](const TensorView& global) {
    tensor.view.global_scale = global;
    dequantize(tensor.view, output.view(3));
  };
  const std::array<float, 3> values{2, 3, 5};
  decode(factors.view());
  for (int64_t i = 0; i < 9; ++i) EXPECT_EQ(output.at(i, 7), values[static_cast<size_t>(i % 3)]);
  decode(TensorView::contiguous(factors.buffer().data(), DType::kF32, {3, 1}));
  for (int64_t i = 0; i < 9; ++i) EXPECT_EQ(output.at(i, 7), values[static_cast<size_t>(i / 3)]);
  decode({});
  for (int64_t i = 0; i < 9; ++i) EXPECT_EQ(output.at(i, 7), 1.0F);
}

TEST(Dequantize, RoundsOnceToSixteenBits) {
  const QuantizedTensor tensor = all_codes(FormatId::kNvfp4);
  tensor.global_scale.data<float>()[0] = 1.0F / 3.0F;
  const Matrix wide = dequantized(tensor.view);
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    const Matrix output({.dtype = dtype, .rows = 256, .cols = 32});
    dequantize(tensor.view, output.view());
    for (int64_t row = 0; row < 256; ++row) {
      for (int64_t col = 0; col < 32; ++col) {
        uint16_t stored = 0;
        std::memcpy(&stored, static_cast<const char*>(output.row(row)) + col * 2, 2);
        ASSERT_EQ(element_bits(dtype, wide.at(row, col)), stored);
      }
    }
  }
}

TEST(Dequantize, IgnoresTheCallersFloatingPointModeAndThreads) {
  for (const FormatInfo& info : all_formats()) {
    const Matrix input =
        Matrix::filled({.dtype = DType::kF32, .rows = 200, .cols = 256}, Fill::kNormalRows, 3);
    const QuantizedTensor tensor = quantized(input, {.format = info.id});
    const std::vector<uint8_t> expected = dequantized(tensor.view).elements();
    for (const unsigned control :
         {kFlushToZero | kDenormalsAreZero, kRoundDown, kRoundUp, kRoundToZero}) {
      const ControlWord word(control);
      EXPECT_EQ(dequantized(tensor.view).elements(), expected) << info.name;
    }
    for (const int threads : {1, 2, 3, 8}) {
      const ThreadLimit limit(threads);
      EXPECT_EQ(dequantized(tensor.view).elements(), expected) << info.name;
    }
  }
}

struct DequantizeCall {
  QuantizedView input;
  TensorView output;
  DequantizeOptions options;
};

struct DequantizeViolation {
  const char* name;
  FormatId format;
  void (*apply)(DequantizeCall& call);
  std::vector<std::string> fragments;
};
void PrintTo(const DequantizeViolation& violation, std::ostream* out) { *out << violation.name; }

class DequantizeChecks : public ::testing::TestWithParam<DequantizeViolation> {};

TEST_P(DequantizeChecks, ThrowAndWriteNothing) {
  const QuantizedTensor input(quantized_layout(GetParam().format, 6, 128, {.batch = 2}),
                              {.poison = 0x30});
  const Matrix output({.dtype = DType::kF32, .batch = 2, .rows = 6, .cols = 128});
  DequantizeCall call{.input = input.view, .output = output.view(3), .options = {}};
  DequantizeCall broken = call;
  GetParam().apply(broken);
  expect_error(ErrorKind::kInvalidArgument, GetParam().fragments,
               [&] { dequantize(broken.input, broken.output, broken.options); });
  EXPECT_EQ(output.elements(), std::vector<uint8_t>(size_t{2 * 6 * 128 * 4}, 0xCC));
  EXPECT_NO_THROW(dequantize(call.input, call.output, call.options));
}

const int64_t kOffsets[] = {0, 6};

INSTANTIATE_TEST_SUITE_P(
    All, DequantizeChecks,
    ::testing::ValuesIn(std::vector<DequantizeViolation>{
        {"output_dtype",
         FormatId::kNvfp4,
         [](DequantizeCall& c) { c.output.dtype = DType::kI32; },
         {"output", "F32 or BF16 or F16", "I32"}},
        {"output_columns",
         FormatId::kNvfp4,
         [](DequantizeCall& c) { c.output.shape[2] = 127; },
         {"output", "128 columns", "127"}},
        {"output_rows",
         FormatId::kMxfp8,
         [](DequantizeCall& c) { c.output.shape[0] = 3; },
         {"output", "2 x 6", "3, 6, 128"}},
        {"output_null",
         FormatId::kMxfp8,
         [](DequantizeCall& c) { c.output.data = nullptr; },
         {"output", "null"}},
        {"output_stride",
         FormatId::kMxfp8,
         [](DequantizeCall& c) { c.output.strides[1] = 100; },
         {"output", "at least 128", "100"}},
        {"output_misaligned",
         FormatId::kMxfp8,
         [](DequantizeCall& c) { c.output.data = static_cast<char*>(c.output.data) + 2; },
         {"output", "aligned to 4"}},
        {"output_device",
         FormatId::kMxfp8,
         [](DequantizeCall& c) { c.output.device.type = DeviceType::kCuda; },
         {"output", "cpu", "cuda:0"}},
        {"columns",
         FormatId::kNvfp4,
         [](DequantizeCall& c) { c.input.cols = 120; },
         {"input", "16", "120"}},
        {"values_dtype",
         FormatId::kNvfp4,
         [](DequantizeCall& c) { c.input.values.dtype = DType::kI8; },
         {"input.values", "U8", "I8"}},
        {"values_null",
         FormatId::kNvfp4,
         [](DequantizeCall& c) { c.input.values.data = nullptr; },
         {"input.values", "null"}},
        {"scales_type",
         FormatId::kNvfp4,
         [](DequantizeCall& c) { c.input.scales.type = ScaleType::kUE8M0; },
         {"input.scales", "E4M3", "UE8M0"}},
        {"scales_capacity",
         FormatId::kNvfp4,
         [](DequantizeCall& c) { c.input.scales.capacity = 7; },
         {"input.scales", "2048", "7"}},
        {"scales_extents",
         FormatId::kNvfp4,
         [](DequantizeCall& c) { c.input.scales.blocks = 7; },
         {"input.scales", "2 x 6 x 8", "2 x 6 x 7"}},
        {"scales_null",
         FormatId::kNvfp4,
         [](DequantizeCall& c) { c.input.scales.data = nullptr; },
         {"input.scales", "null"}},
        {"global_count",
         FormatId::kNvfp4,
         [](DequantizeCall& c) { c.input.global_scale.shape[0] = 5; },
         {"input.global_scale", "F32[5]"}},
        {"global_dtype",
         FormatId::kNvfp4,
         [](DequantizeCall& c) { c.input.global_scale.dtype = DType::kF16; },
         {"input.global_scale", "F32", "F16"}},
        {"global_unused",
         FormatId::kMxfp4,
         [](DequantizeCall& c) {
           c.input.global_scale = TensorView::contiguous(c.input.scales.data, DType::kF32, {1});
         },
         {"input.global_scale", "mxfp4"}},
        {"row_scale_absent",
         FormatId::kNvfp4PerToken,
         [](DequantizeCall& c) { c.input.global_scale = {}; },
         {"input.global_scale"}},
        {"row_scale_count",
         FormatId::kNvfp4PerToken,
         [](DequantizeCall& c) { c.input.global_scale.shape[0] = 6; },
         {"input.global_scale", "12", "F32[6]"}},
        {"divides",
         FormatId::kMxfp4,
         [](DequantizeCall& c) { c.options.global_scale_divides = true; },
         {"global_scale_divides", "mxfp4"}},
        {"offsets_format",
         FormatId::kMxfp4,
         [](DequantizeCall& c) {
           c.options.row_offsets = TensorView::contiguous(kOffsets, DType::kI64, {2});
         },
         {"row_offsets", "fp8_1x128"}},
        {"offsets_batch",
         FormatId::kFp8Block1x128,
         [](DequantizeCall& c) {
           c.options.row_offsets = TensorView::contiguous(kOffsets, DType::kI64, {2});
         },
         {"row_offsets", "batch 1"}},
    }),
    [](const auto& test) { return test.param.name; });

TEST(Dequantize, RefusesDevicesItCannotDoWithEveryCandidatesReason) {
  if (build_has_cuda()) GTEST_SKIP() << "this build has implementations for CUDA";
  QuantizedTensor input(quantized_layout(FormatId::kMxfp8, 6, 128));
  Matrix output({.dtype = DType::kF32, .rows = 6, .cols = 128});
  const Device gpu{.type = DeviceType::kCuda, .index = 3};
  input.view.values.device = input.view.scales.device = gpu;
  TensorView to = output.view();
  to.device = gpu;
  expect_error(ErrorKind::kUnsupported,
               {"dequantize", "cuda:3", "cpu_baseline", "cpu_reference", "runs on the CPU only"},
               [&] { dequantize(input.view, to); });
}

// Every buffer and row of a GPU's tensors starts at a multiple of 16 bytes (spec 1.8). Nothing is
// read or written before that is checked, so host memory can stand in.
TEST(Dequantize, RefusesMisalignedTensorsOnAGpu) {
  struct Misaligned {
    const char* argument;
    void (*apply)(QuantizedView& input, TensorView& output);
  };
  const Device gpu{.type = DeviceType::kCuda, .index = 0};
  for (const Misaligned& misaligned :
       {Misaligned{"input.values",
                   [](QuantizedView&input, TensorView&) {
                     input.values.data = static_cast<char*>(input.values.data) + 8;
                   }},
        Misaligned{"input.scales",
                   [](QuantizedView&input, TensorView&) {
                     input.scales.data = static_cast<char*>(input.scales.data) + 4;
                   }},
        Misaligned{"output",
                   [](QuantizedView&, TensorView&output) {
                     output.data = static_cast<char*>(output.data) + 8;
                   }},
        Misaligned{"output", [](QuantizedView&, TensorView&output) { output.strides[0] = 130; }}}) {
    const QuantizedTensor input(quantized_layout(FormatId::kMxfp8, 2, 128));
    const Matrix output({.dtype = DType::kF32, .rows = 2, .cols = 128, .gap = 8});
    QuantizedView from = input.view;
    TensorView to = output.view();
    from.values.device = from.scales.device = to.device = gpu;
    misaligned.apply(from, to);
    expect_error(ErrorKind::kInvalidArgument, {misaligned.argument, "16 bytes", "cuda:0"},
                 [&] { dequantize(from, to); });
  }
}

TEST(Dequantize, AcceptsEmptyTensorsWithoutBuffers) {
  for (const FormatInfo& info : all_formats()) {
    for (const auto& [batch, rows, cols] :
         {std::array<int64_t, 3>{1, 0, 128}, {1, 4, 0}, {0, 4, 128}}) {
      QuantizedTensor input(quantized_layout(info.id, rows, cols, {.batch = batch}));
      input.view.values.data = nullptr;
      EXPECT_NO_THROW(dequantize(
          input.view, TensorView::contiguous(nullptr, DType::kBF16, {batch, rows, cols})))
          << info.name;
    }
  }
}

}  // namespace
}  // namespace narrowfloat::testing
